/* lion.py. a: momentum. */
#define STATES 1
#define NUMBERS 0

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    const REAL mean = *a + (gradient - *a) * s[3];
    *p = *p * s[2] - s[5] * (REAL)((mean > 0) - (mean < 0));
    *a += (gradient - *a) * s[4];
    (void)b, (void)c, (void)n;
}
