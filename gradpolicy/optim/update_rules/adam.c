/* adam.py. a: first moment, b: second moment, c: its largest value. */
#define STATES 3
#define NUMBERS 2

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    *a += (gradient - *a) * s[3];
    *b = *b * s[4] + gradient * gradient * s[5];
    *c = LARGER(*b, s[8] * *c);
    *p = *p * s[2] - s[6] * n[0] * (*a / (SQRT(*c) * n[1] + s[7]));
}
