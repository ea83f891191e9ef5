/* rmsprop.py. a: mean square, b: momentum, c: mean. */
#define STATES 3
#define NUMBERS 0

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    *a = *a * s[2] + gradient * gradient * s[3];
    *c += (gradient - *c) * s[3] * s[5];
    *b = *b * s[4] + gradient / (SQRT(*a - *c * *c) + s[7]);
    *p -= s[6] * *b;
    (void)n;
}
