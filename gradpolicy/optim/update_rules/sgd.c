/* sgd.py. a: momentum. */
#define STATES 1
#define NUMBERS 1

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    *a = s[2] * *a + n[0] * gradient;
    *p -= s[5] * (s[3] * gradient + s[4] * *a);
    (void)b, (void)c;
}
