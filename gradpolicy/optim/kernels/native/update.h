/* One update of active entries, for one rule and one type to compute in.
 *
 * Included once for each of them, with STATES, NUMBERS, REAL, SQRT and NAME defined, after the rule's body
 *     static inline void BODY(REAL *p, REAL g, REAL *a, REAL *b, REAL *c, const REAL *settings, const REAL *n).
 * Frozen entries are written back with the bits that were read, or not at all. */

static inline void NAME(load)(REAL *restrict to, const void *from, int32_t type, int64_t at,
                              const int32_t *restrict offsets, int64_t count)
{
    if (type == BFLOAT16) {
        const uint16_t *values = (const uint16_t *)from + at;
        for (int64_t i = 0; i < count; i++) to[i] = (REAL)from_bfloat16(values[offsets ? offsets[i] : i]);
    } else if (offsets) {
        const REAL *values = (const REAL *)from + at;
        for (int64_t i = 0; i < count; i++) to[i] = values[offsets[i]];
    } else memcpy(to, (const REAL *)from + at, count * sizeof(REAL));
}

static inline void NAME(store)(void *to, const REAL *restrict from, int32_t type, int64_t at,
                               const int32_t *restrict offsets, const int16_t *restrict ages, int64_t count)
{
    if (type == BFLOAT16) {
        uint16_t *values = (uint16_t *)to + at;
        if (offsets) for (int64_t i = 0; i < count; i++) values[offsets[i]] = to_bfloat16((float)from[i]);
        else if (!ages) for (int64_t i = 0; i < count; i++) values[i] = to_bfloat16((float)from[i]);
        else for (int64_t i = 0; i < count; i++) {
            const uint16_t taken = (uint16_t)-(ages[i] > 0);
            values[i] = (uint16_t)((to_bfloat16((float)from[i]) & taken) | (values[i] & ~taken));
        }
        return;
    }
    REAL *values = (REAL *)to + at;
    if (offsets) for (int64_t i = 0; i < count; i++) values[offsets[i]] = from[i];
    else memcpy(values, from, count * sizeof(REAL));
}

/* The rule for entries that lie one after the other. Inlined, so that all but the vectors is constant.
 *
 * ages     above 0 where an entry is active; NULL: all are
 * kept     how many of a, b and c there are; the others are 0
 * shared   whether `numbers` are one set for all */
static inline __attribute__((always_inline)) void NAME(apply)(
    REAL *restrict p, const REAL *restrict g, REAL *restrict a, REAL *restrict b, REAL *restrict c, int64_t count,
    const int16_t *restrict ages, const REAL *restrict settings, const REAL *restrict numbers, int kept, int shared)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const REAL old_p = p[i], old_a = kept > 0 ? a[i] : 0, old_b = kept > 1 ? b[i] : 0, old_c = kept > 2 ? c[i] : 0;
        REAL new_p = old_p, new_a = old_a, new_b = old_b, new_c = old_c;
        BODY(&new_p, g[i], &new_a, &new_b, &new_c, settings, shared ? numbers : numbers + i * NUMBERS);
        const int on = ages ? ages[i] > 0 : 1;
        p[i] = on ? new_p : old_p;
        if (kept > 0) a[i] = on ? new_a : old_a;
        if (kept > 1) b[i] = on ? new_b : old_b;
        if (kept > 2) c[i] = on ? new_c : old_c;
    }
}

#define APPLY(ages, kept, shared) \
    NAME(apply)(p, g, state[0], state[1], state[2], count, ages, settings, numbers, kept, shared)
#define APPLY_KEPT(ages, shared)                      \
    do {                                              \
        if (kept == STATES) APPLY(ages, STATES, shared);  \
        else if (kept == STATES - 1) APPLY(ages, STATES - 1, shared); \
        else APPLY(ages, STATES - 2, shared);         \
    } while (0)

/* Updates up to TILE entries.
 *
 * at       where they lie in the parameter, or what `offsets` are counted from
 * grad_at  the same for the gradient
 * own      where their state lies
 * ages     above 0 where an entry is active; NULL: all are
 * numbers  the numbers of each entry, or one set for all where `shared` */
static void NAME(tile)(const update_job *j, const REAL *settings, int64_t at, int64_t grad_at, const int32_t *offsets,
                       int64_t own, int64_t count, const int16_t *ages, const REAL *numbers, int shared)
{
    REAL copies[2 + STATES][TILE]; /* of what does not lie as it is computed */
    const int copied = offsets || j->type == BFLOAT16;
    REAL *p = copies[0], *g = copies[1], *state[3] = {NULL, NULL, NULL};
    int kept = 0;
    if (copied) {
        NAME(load)(p, j->parameter, j->type, at, offsets, count);
        NAME(load)(g, j->gradient, j->type, grad_at, j->gradient_packed ? NULL : offsets, count);
    } else p = (REAL *)j->parameter + at, g = (REAL *)j->gradient + grad_at;
    for (int k = 0; k < STATES; k++) {
        state[k] = copies[2 + k];
        if (j->state[k]) kept = k + 1;
    }
    for (int k = 0; k < kept; k++) {
        if (!j->state[k]) memset(state[k], 0, count * sizeof(REAL));
        else if (j->type == BFLOAT16) NAME(load)(state[k], j->state[k], j->type, own, NULL, count);
        else state[k] = (REAL *)j->state[k] + own;
    }
    if (shared && ages) APPLY_KEPT(ages, 1);
    else if (shared) APPLY_KEPT(NULL, 1);
    else if (ages) APPLY_KEPT(ages, 0);
    else APPLY_KEPT(NULL, 0);
    if (copied) NAME(store)(j->parameter, p, j->type, at, offsets, ages, count);
    for (int k = 0; k < kept; k++)
        if (j->state[k] && j->type == BFLOAT16) NAME(store)(j->state[k], state[k], j->type, own, NULL, ages, count);
}

#undef APPLY
#undef APPLY_KEPT

/* Reads the ages of a tile. Returns whether any entry is active.
 *
 * signs  above 0 where an entry is active: the ages themselves, or what is written to `narrow`
 * rows   each entry's row of numbers */
static int NAME(read_ages)(const update_job *j, int64_t own, int64_t count, const int16_t **signs,
                           int16_t *restrict narrow, int32_t *restrict rows)
{
    int any = 0;
    if (j->age_bytes == 2) {
        const int16_t *restrict ages = (const int16_t *)j->ages + own;
        *signs = ages;
        for (int64_t i = 0; i < count; i++) any |= ages[i] > 0;
        if (rows) for (int64_t i = 0; i < count; i++) rows[i] = ages[i] > 0 ? ages[i] - 1 : 0;
    } else {
        const int32_t *restrict ages = (const int32_t *)j->ages + own;
        *signs = narrow;
        for (int64_t i = 0; i < count; i++) any |= narrow[i] = ages[i] > 0;
        if (rows) for (int64_t i = 0; i < count; i++) rows[i] = ages[i] > 0 ? ages[i] - 1 : 0;
    }
    return any;
}

/* The numbers of each entry. Up to three rows beyond the last are read too. */
static void NAME(look_up)(REAL *restrict numbers, const REAL *restrict table, const int32_t *restrict rows, int64_t n)
{
    for (int64_t i = 0; i < n; i += 4) {
        for (int64_t k = i; k < i + 4; k++)
            memcpy(numbers + k * NUMBERS, table + (int64_t)rows[k] * NUMBERS, NUMBERS * sizeof(REAL));
        __asm__ volatile(""); /* keeps the compiler from gathering, which takes twice as long */
    }
}

/* Entries that each have an age of their own; with `offsets` they are all active and their state is packed. */
static void NAME(entries)(const update_job *j, const REAL *settings, int64_t at, const int32_t *offsets, int64_t own,
                          int64_t count)
{
    const int16_t *signs;
    int16_t narrow[TILE];
    int32_t rows[TILE + 3];
    REAL own_numbers[(TILE + 3) * NUMBERS + 1];
    const REAL *numbers = (const REAL *)j->numbers + j->row * NUMBERS;
    const int shared = NUMBERS == 0 || j->shared;
    if (!NAME(read_ages)(j, own, count, &signs, narrow, shared ? NULL : rows)) return;
    if (!shared) {
        rows[count] = rows[count + 1] = rows[count + 2] = 0;
        NAME(look_up)(own_numbers, numbers, rows, count);
    }
    NAME(tile)(j, settings, at, j->gradient_packed ? own : at, offsets, own, count, offsets ? NULL : signs,
               shared ? numbers : own_numbers, shared);
}

/* A block of several entries, which share an age and are all active. */
static void NAME(row)(const update_job *j, const REAL *settings, int64_t block, int64_t grad_block, int64_t own_block)
{
    const int64_t row = j->row + (j->shared ? 0 : age_of(j->ages, j->age_bytes, own_block) - 1);
    const REAL *numbers = (const REAL *)j->numbers + row * NUMBERS;
    for (int64_t done = 0; done < j->block; done += TILE)
        NAME(tile)(j, settings, block * j->block + done, grad_block * j->block + done, NULL,
                   own_block * j->block + done, smaller(TILE, j->block - done), NULL, numbers, 1);
}

/* The first active block from `b` on, or `last`. */
static int64_t NAME(next_active)(const update_job *j, int64_t b, int64_t last)
{
    while (b < last && !(j->active ? is_set(j->active, b) : age_of(j->ages, j->age_bytes, b) > 0)) b++;
    return b;
}

/* How many of the first blocks are active; only counted where something is packed. */
static int64_t NAME(count_active)(const update_job *j, int64_t blocks)
{
    if (j->active) return count_bits(j->active, blocks);
    int64_t found = 0;
    for (int64_t b = 0; j->gradient_packed && b < blocks; b++) found += age_of(j->ages, j->age_bytes, b) > 0;
    return found;
}

/* Prefetches a block, which the processor does not foresee behind frozen ones.
 * Always inlined: GCC drops calls of a function that does nothing else. */
static inline __attribute__((always_inline)) void NAME(fetch)(const update_job *j, int64_t b, int64_t grad_block,
                                                              int64_t own_block)
{
    const int64_t item = j->type == BFLOAT16 ? 2 : sizeof(REAL), bytes = j->block * item;
    for (int64_t i = 0; i < smaller(bytes, FETCHED); i += LINE) {
        __builtin_prefetch((const char *)j->parameter + b * bytes + i, 1, 2);
        __builtin_prefetch((const char *)j->gradient + grad_block * bytes + i, 0, 2);
        for (int k = 0; k < STATES; k++)
            if (j->state[k]) __builtin_prefetch((const char *)j->state[k] + own_block * bytes + i, 1, 2);
    }
}

/* The active blocks of a part, of several entries each. */
static void NAME(rows)(const update_job *j, const REAL *settings, int64_t first, int64_t last)
{
    int64_t packed = NAME(count_active)(j, first); /* of this part's first active block, among all active ones */
    for (int64_t next, b = NAME(next_active)(j, first, last); b < last; b = next, packed++) {
        next = NAME(next_active)(j, b + 1, last);
        const int64_t grad = j->gradient_packed ? packed : b, next_grad = j->gradient_packed ? packed + 1 : next;
        if (b + 1 < next && next < last) NAME(fetch)(j, next, next_grad, j->active ? packed + 1 : next);
        NAME(row)(j, settings, b, grad, j->active ? packed : b);
    }
}

/* The active entries of a part whose state is packed, a tile at a time. */
static void NAME(packed_entries)(const update_job *j, const REAL *settings, int64_t first, int64_t last)
{
    int32_t offsets[TILE + 64];
    int64_t own = count_bits(j->active, first), found = 0, base = first;
    for (int64_t word = first / 64; word * 64 < last; word++) {
        if (found == 0) base = word * 64;
        for (uint64_t left = word_of(j->active, word); left; left &= left - 1)
            offsets[found++] = (int32_t)(word * 64 - base + __builtin_ctzll(left));
        if (found < TILE && (word + 1) * 64 < last && (word + 1) * 64 - base < INT32_MAX - 64) continue;
        for (int64_t done = 0; done < found; done += TILE)
            NAME(entries)(j, settings, base, offsets + done, own + done, smaller(TILE, found - done));
        own += found;
        found = 0;
    }
}

static void NAME(part)(const update_job *j, int64_t first, int64_t last)
{
    REAL settings[MAX_SETTINGS];
    for (int i = 0; i < MAX_SETTINGS; i++) settings[i] = (REAL)j->settings[i];
    if (j->block == 1 && j->active) NAME(packed_entries)(j, settings, first, last);
    else if (j->block == 1)
        for (int64_t at = first; at < last; at += TILE)
            NAME(entries)(j, settings, at, NULL, at, smaller(TILE, last - at));
    else NAME(rows)(j, settings, first, last);
}
