/* nadam.py. a: first moment, b: second moment. */
#define STATES 2
#define NUMBERS 3

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    *a += (gradient - *a) * s[3];
    *b = *b * s[4] + gradient * gradient * s[5];
    *p = *p * s[2] - s[6] * ((n[0] * gradient + n[1] * *a) / (SQRT(*b) * n[2] + s[7]));
    (void)c;
}
