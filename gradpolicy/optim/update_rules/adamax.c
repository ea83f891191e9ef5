/* adamax.py. a: first moment, b: infinity norm. */
#define STATES 2
#define NUMBERS 1

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    *a += (gradient - *a) * s[3];
    *b = LARGER(s[4] * *b, (gradient < 0 ? -gradient : gradient) + s[7]);
    *p = *p * s[2] - s[6] * n[0] * (*a / *b);
    (void)c;
}
