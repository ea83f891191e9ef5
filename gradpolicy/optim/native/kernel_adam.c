/* Adam for entries by their own age, for one floating type. kernel.c includes this once a type, with
 * REAL: what to compute in; STORAGE: what memory holds; LOAD, STORE: between the two; VECTORS: whether
 * kernel_avx2.c knows the type; NAME: adds a suffix. */

typedef struct { REAL size, inverse; } NAME(correction);

/* `sign` below 0 marks active entries (NULL: all are); `sizes` and `inverses` correct each entry (NULL: `one` all). */
static inline __attribute__((always_inline)) void NAME(entries)(
    const job *j, STORAGE *restrict parameter, const STORAGE *restrict gradient, STORAGE *restrict first,
    STORAGE *restrict second, STORAGE *restrict largest, const int8_t *restrict sign,
    const REAL *restrict sizes, const REAL *restrict inverses, NAME(correction) one, int64_t count)
{
    const settings *by = j->settings;
    const REAL one_beta1 = (REAL)(1.0 - by->beta1), beta2 = (REAL)by->beta2, one_beta2 = (REAL)(1.0 - by->beta2);
    const REAL eps = (REAL)by->eps, shrink = (REAL)(by->decoupled ? 1.0 - by->lr * by->weight_decay : 1.0);
    const REAL decay = (REAL)(by->decoupled ? 0.0 : by->weight_decay);
    const REAL factor = (REAL)((by->maximize ? -1.0 : 1.0) / by->scale);
    for (int64_t i = 0; i < count; i++) {
        const int active = sign ? sign[i] < 0 : 1;
        const REAL p = LOAD(parameter[i]), m = LOAD(first[i]), v = LOAD(second[i]);
        REAL g = LOAD(gradient[i]) * factor;
        if (decay != 0) g += p * decay;
        const REAL new_m = m + (g - m) * one_beta1, new_v = v * beta2 + g * g * one_beta2;
        REAL top = new_v;
        if (largest) {
            const REAL before = LOAD(largest[i]);
            top = (new_v > before || new_v != new_v) ? new_v : before;
            largest[i] = active ? STORE(top) : largest[i];
        }
        const REAL size = sizes ? sizes[i] : one.size, inverse = sizes ? inverses[i] : one.inverse;
        const REAL new_p = p * shrink - size * new_m / (ROOT(top) * inverse + eps);
        parameter[i] = active ? STORE(new_p) : parameter[i];
        first[i] = active ? STORE(new_m) : first[i];
        second[i] = active ? STORE(new_v) : second[i];
    }
}

/* `entries` for each case of its own, so that no test is left in the loop. */
static void NAME(some)(const job *j, int64_t at, int64_t own_at, STORAGE *p, const STORAGE *g, const int8_t *sign,
                       const REAL *sizes, const REAL *inverses, NAME(correction) one, int64_t n)
{
    STORAGE *m = (STORAGE *)j->first + own_at, *v = (STORAGE *)j->second + own_at;
    STORAGE *x = j->largest ? (STORAGE *)j->largest + own_at : NULL;
    p += at, g += at;
    if (x && sign && sizes) NAME(entries)(j, p, g, m, v, x, sign, sizes, inverses, one, n);
    else if (x && sign) NAME(entries)(j, p, g, m, v, x, sign, NULL, NULL, one, n);
    else if (x && sizes) NAME(entries)(j, p, g, m, v, x, NULL, sizes, inverses, one, n);
    else if (x) NAME(entries)(j, p, g, m, v, x, NULL, NULL, NULL, one, n);
    else if (sign && sizes) NAME(entries)(j, p, g, m, v, NULL, sign, sizes, inverses, one, n);
    else if (sign) NAME(entries)(j, p, g, m, v, NULL, sign, NULL, NULL, one, n);
    else if (sizes) NAME(entries)(j, p, g, m, v, NULL, NULL, sizes, inverses, one, n);
    else NAME(entries)(j, p, g, m, v, NULL, NULL, NULL, NULL, one, n);
}

/* The corrections of codes at..at+n-1. One load a code beats the gather instructions. */
static __attribute__((noinline, optimize("no-tree-vectorize"))) void NAME(load)(
    const job *j, int64_t at, int64_t n, NAME(correction) *restrict own)
{
    const NAME(correction) *table = (const NAME(correction) *)j->corrections;
    if (j->code_bytes == 1) {
        const uint8_t *codes = (const uint8_t *)j->codes + at;
        for (int64_t i = 0; i < n; i++) own[i] = table[codes[i] & 0x7f];
    } else {
        for (int64_t i = 0; i < n; i++) own[i] = table[slot_at(j, at + i)];
    }
}

static void NAME(look_up)(const job *j, int64_t at, int64_t n, REAL *restrict sizes, REAL *restrict inverses)
{
    NAME(correction) own[TILE];
    NAME(load)(j, at, n, own);
    for (int64_t i = 0; i < n; i++) {
        sizes[i] = own[i].size;
        inverses[i] = own[i].inverse;
    }
}

/* Entries start..stop-1 of a tensor with a code an entry. */
static void NAME(dense)(const job *j, int64_t start, int64_t stop)
{
    const NAME(correction) one = *(const NAME(correction) *)j->corrections;
    REAL sizes[TILE], inverses[TILE];
    int8_t buffer[TILE];
    for (int64_t at = VECTORS ? vector_dense(j, start, stop) : start; at < stop; at += TILE) {
        const int64_t n = stop - at < TILE ? stop - at : TILE;
        const int8_t *sign = signs(j, at, n, buffer);
        if (!any_active(sign, n)) continue;
        const int many = j->slots > 1;
        if (many) NAME(look_up)(j, at, n, sizes, inverses);
        NAME(some)(j, at, at, (STORAGE *)j->parameter, (const STORAGE *)j->gradient, sign,
                   many ? sizes : NULL, many ? inverses : NULL, one, n);
    }
}

/* The beginning of an active row, which no hardware foresees. */
static inline void NAME(announce)(const job *j, int64_t row, int64_t rows)
{
    if (row >= rows) return;
    const int64_t at = j->rows[row] * j->block, own_at = (j->packed ? row : j->rows[row]) * j->block;
    const void *streams[] = {(STORAGE *)j->parameter + at, (const STORAGE *)j->gradient + at,
                             (STORAGE *)j->first + own_at, (STORAGE *)j->second + own_at};
    const int64_t bytes = j->block * (int64_t)sizeof(STORAGE) < ANNOUNCED ? j->block * (int64_t)sizeof(STORAGE) : ANNOUNCED;
    for (int i = 0; i < 4; i++)
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((const char *)streams[i] + byte);
}

/* Entries start..stop-1, counted over the active rows alone. */
static void NAME(rows)(const job *j, int64_t start, int64_t stop)
{
    const lanes l = VECTORS ? lanes_of(j) : (lanes){0};
    const int64_t rows = j->size / j->block, ahead = 1 + FORESIGHT / j->block;
    int64_t row = start / j->block, inside = start % j->block;
    for (int64_t n; start < stop; start += n, row++, inside = 0) {
        n = j->block - inside < stop - start ? j->block - inside : stop - start;
        NAME(announce)(j, row + ahead, rows);
        const int64_t where = j->rows[row], own = j->packed ? row : where;
        const NAME(correction) one = ((const NAME(correction) *)j->corrections)[j->slots == 1 ? 0 : slot_at(j, own)];
        const int64_t at = where * j->block + inside, own_at = own * j->block + inside;
        if (VECTORS && vector_run(j, &l, at, own_at, (float)one.size, (float)one.inverse, n)) continue;
        NAME(some)(j, at, own_at, (STORAGE *)j->parameter, (const STORAGE *)j->gradient, NULL, NULL, NULL, one, n);
    }
}

/* The entries among start..stop-1 whose bit is set; `start` is a multiple of GRAIN. */
static void NAME(packed)(const job *j, int64_t start, int64_t stop)
{
    STORAGE *p = (STORAGE *)j->parameter;
    const STORAGE *g = (const STORAGE *)j->gradient;
    const NAME(correction) one = *(const NAME(correction) *)j->corrections;
    STORAGE parameter[TILE], gradient[TILE];
    REAL sizes[TILE], inverses[TILE];
    const int many = j->slots > 1;
    int64_t at = j->offsets[start / GRAIN], n = 0;
    int32_t place[TILE];
    for (int64_t base = start; base < stop; base += 64) {
        for (uint64_t word = word_at(j->bits, base, j->size); word; word &= word - 1)
            place[n++] = (int32_t)(base - start) + __builtin_ctzll(word);
        if (n + 64 <= TILE && base + 64 < stop) continue;
        for (int64_t i = 0; i < n; i++) {
            parameter[i] = p[start + place[i]];
            gradient[i] = g[start + place[i]];
        }
        const int64_t done = VECTORS ? vector_gathered(j, (float *)parameter, (const float *)gradient, at, n) : 0;
        if (many) NAME(look_up)(j, at + done, n - done, sizes, inverses);
        NAME(some)(j, done, at + done, parameter, gradient, NULL, many ? sizes : NULL, many ? inverses : NULL, one, n - done);
        for (int64_t i = 0; i < n; i++) p[start + place[i]] = parameter[i];
        at += n;
        n = 0;
    }
}

static void NAME(part)(const job *j, int64_t start, int64_t stop)
{
    if (j->rows) NAME(rows)(j, start, stop);
    else if (j->bits) NAME(packed)(j, start, stop);
    else if (sizeof(STORAGE) < sizeof(REAL)) dense_widened(j, start, stop);
    else NAME(dense)(j, start, stop);
}

#undef REAL
#undef STORAGE
#undef LOAD
#undef STORE
#undef ROOT
#undef VECTORS
#undef NAME
