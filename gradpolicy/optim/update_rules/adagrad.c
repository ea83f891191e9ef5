/* adagrad.py. a: sum of squares. */
#define STATES 1
#define NUMBERS 1

static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *s, const REAL *n)
{
    const REAL gradient = s[0] * g + s[1] * *p;
    *a += gradient * gradient;
    *p -= s[2] * n[0] * (gradient / (SQRT(*a) + s[3]));
    (void)b, (void)c;
}
