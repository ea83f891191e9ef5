/* Masked Adam and the moves that masks need, for a CPU. moves.py compiles it, adam.py mirrors `job`.
 * Frozen entries are written back with the bits that were read, or not at all. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define GRAIN 16384 /* entries a thread takes at once; the same as in moves.py */
#define TILE 256
#define ANNOUNCED 256 /* bytes of a row that are fetched beforehand; the rest follows by itself */
#define FORESIGHT 256 /* entries to look ahead where rows are short */
#define PARTS_PER_THREAD 2 /* fewer are not worth a thread */

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, scale;
    int32_t maximize, decoupled;
} settings;

typedef struct {
    void *parameter;
    const void *gradient;
    void *first, *second, *largest;            /* largest: NULL without AMSGrad */
    void *step;                                /* a number to count up, or NULL */
    const void *codes;                         /* below 0: active; the low bits are the slot */
    const int64_t *rows;                       /* active rows, or NULL */
    const uint8_t *bits;                       /* which entries are held, or NULL */
    const int64_t *offsets;                    /* held entries before each GRAIN */
    const void *corrections;                   /* step size and 1 / root of each slot, or a single pair */
    const settings *settings;
    int64_t slots, size, block;                /* size: entries to walk */
    int32_t code_bytes, type, packed, step_bytes;
} job;

static inline int64_t slot_at(const job *j, int64_t i)
{
    if (j->code_bytes == 1) return ((const uint8_t *)j->codes)[i] & 0x7f;
    if (j->code_bytes == 2) return ((const uint16_t *)j->codes)[i] & 0x7fff;
    return ((const uint32_t *)j->codes)[i] & 0x7fffffff;
}

/* Codes as bytes that keep their sign. */
static inline const int8_t *signs(const job *j, int64_t at, int64_t n, int8_t *buffer)
{
    if (j->code_bytes == 1) return (const int8_t *)j->codes + at;
    if (j->code_bytes == 2) for (int64_t i = 0; i < n; i++) buffer[i] = -(((const int16_t *)j->codes)[at + i] < 0);
    else for (int64_t i = 0; i < n; i++) buffer[i] = -(((const int32_t *)j->codes)[at + i] < 0);
    return buffer;
}

static inline int any_active(const int8_t *sign, int64_t n)
{
    int8_t all = 0;
    for (int64_t i = 0; i < n; i++) all |= sign[i];
    return all < 0;
}

/* Eight bytes, the missing ones 0. */
static inline uint64_t eight_at(const uint8_t *bytes, int64_t left)
{
    uint64_t eight = 0;
    if (left >= 8) memcpy(&eight, bytes, 8); /* of a fixed size this is one load */
    else memcpy(&eight, bytes, left);
    return eight;
}

static inline uint64_t word_at(const uint8_t *bits, int64_t base, int64_t size)
{
    return eight_at(bits + base / 8, (size - base + 7) / 8);
}

#ifdef __AVX2__
#include "kernel_avx2.c"
#else
typedef struct { int none; } lanes;
static lanes lanes_of(const job *j) { return (void)j, (lanes){0}; }
static int64_t vector_dense(const job *j, int64_t start, int64_t stop) { return (void)j, (void)stop, start; }
static int64_t vector_gathered(const job *j, float *parameter, const float *gradient, int64_t own_at, int64_t count)
{
    return (void)j, (void)parameter, (void)gradient, (void)own_at, (void)count, 0;
}
static int vector_run(const job *j, const lanes *l, int64_t at, int64_t own_at, float size, float inverse, int64_t count)
{
    return (void)j, (void)l, (void)at, (void)own_at, (void)size, (void)inverse, (void)count, 0;
}
#endif

static inline float from_bfloat(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bfloat(float value) /* to nearest, ties to even */
{
    uint32_t wide;
    memcpy(&wide, &value, 4);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0 : rounded);
}

static void dense_widened(const job *j, int64_t start, int64_t stop);

#define REAL float
#define STORAGE float
#define VECTORS 1
#define LOAD(x) (x)
#define STORE(x) (x)
#define ROOT sqrtf
#define NAME(x) x##_float
#include "kernel_adam.c"

#define REAL double
#define STORAGE double
#define VECTORS 0
#define LOAD(x) (x)
#define STORE(x) (x)
#define ROOT sqrt
#define NAME(x) x##_double
#include "kernel_adam.c"

static void widen(float *restrict wide, const uint16_t *restrict values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) wide[i] = from_bfloat(values[i]);
}

/* Rounds what is active; selecting by `if` is no vector code here. */
static void narrow(uint16_t *restrict values, const float *restrict wide, const int8_t *restrict sign, int64_t n)
{
    uint16_t fresh[TILE];
    for (int64_t i = 0; i < n; i++) fresh[i] = to_bfloat(wide[i]);
    for (int64_t i = 0; i < n; i++) {
        const uint16_t taken = (uint16_t)(sign[i] >> 7);
        values[i] = (uint16_t)((fresh[i] & taken) | (values[i] & ~taken));
    }
}

/* bfloat16 with a code an entry: a tile is updated as float32. */
static void dense_widened(const job *j, int64_t start, int64_t stop)
{
    uint16_t *const vectors[] = {(uint16_t *)j->parameter, (uint16_t *)j->first, (uint16_t *)j->second, (uint16_t *)j->largest};
    const int count = j->largest ? 4 : 3;
    float wide[4][TILE], gradient[TILE];
    int8_t buffer[TILE];
    job tile = *j;
    tile.parameter = wide[0], tile.first = wide[1], tile.second = wide[2], tile.gradient = gradient;
    tile.largest = j->largest ? wide[3] : NULL;
    for (int64_t at = start; at < stop; at += TILE) {
        const int64_t n = stop - at < TILE ? stop - at : TILE;
        const int8_t *sign = signs(j, at, n, buffer);
        if (!any_active(sign, n)) continue;
        tile.codes = (const char *)j->codes + at * j->code_bytes;
        widen(gradient, (const uint16_t *)j->gradient + at, n);
        for (int k = 0; k < count; k++) widen(wide[k], vectors[k] + at, n);
        dense_float(&tile, 0, n);
        for (int k = 0; k < count; k++) narrow(vectors[k] + at, wide[k], sign, n);
    }
}

#define REAL float
#define STORAGE uint16_t
#define VECTORS 0
#define LOAD(x) from_bfloat(x)
#define STORE(x) to_bfloat(x)
#define ROOT sqrtf
#define NAME(x) x##_bfloat
#include "kernel_adam.c"

/* --- threads: OpenMP's, which are torch's own; where the compiler has none, the caller does it all. */

typedef void (*part_function)(const void *context, int64_t part);

/* `worth`: how many threads the work is enough for. */
static void share_out(part_function run, const void *context, int64_t parts, int64_t worth, int threads)
{
    const int64_t wanted = worth < threads ? worth : threads;
    (void)wanted;
#pragma omp parallel for schedule(dynamic) num_threads((int)wanted) if (wanted > 1)
    for (int64_t part = 0; part < parts; part++) run(context, part);
}

static void in_parallel(part_function run, const void *context, int64_t parts, int threads)
{
    share_out(run, context, parts, parts / PARTS_PER_THREAD, threads);
}

static inline int64_t parts_of(int64_t size) { return (size + GRAIN - 1) / GRAIN; }

/* Whose part this is, of some whose first parts are known. */
static int64_t owner_of(const int64_t *first_parts, int64_t count, int64_t part)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (first_parts[middle] <= part) low = middle; else high = middle;
    }
    return low;
}

typedef struct { const job *const *jobs; int64_t count, *first_parts; } schedule;

static void adam_part(const void *context, int64_t part)
{
    const schedule *s = (const schedule *)context;
    const int64_t which = owner_of(s->first_parts, s->count, part);
    const job *j = s->jobs[which];
    const int64_t start = (part - s->first_parts[which]) * GRAIN;
    const int64_t stop = start + GRAIN < j->size ? start + GRAIN : j->size;
    if (j->type == 0) part_float(j, start, stop);
    else if (j->type == 1) part_double(j, start, stop);
    else part_bfloat(j, start, stop);
}

/* Carries out jobs and counts their steps up; `first_parts` has room for count + 1 numbers. */
void gradpolicy_adam(const job *const *jobs, int64_t count, int64_t *first_parts, int threads)
{
    int64_t entries = 0;
    first_parts[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const job *j = jobs[i];
        first_parts[i + 1] = first_parts[i] + parts_of(j->size);
        entries += j->size;
        if (j->step_bytes == 4) *(float *)j->step += 1;
        else if (j->step_bytes == 8) *(double *)j->step += 1;
    }
    const schedule s = {jobs, count, first_parts};
    share_out(adam_part, &s, first_parts[count], entries / (PARTS_PER_THREAD * GRAIN), threads);
}

/* --- codes and flags */

typedef struct { uint8_t *codes; const uint8_t *mask, *table; int64_t size, slots; int8_t thaw, freeze; } recoding;

/* What entries start..start+15 of the table say for `index`. */
#define SIXTEEN(start) _mm256_shuffle_epi8( \
    _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + (start)))), index)

static void recode_part(const void *context, int64_t part)
{
    const recoding *r = (const recoding *)context;
    const int64_t start = part * GRAIN, stop = start + GRAIN < r->size ? start + GRAIN : r->size;
    int8_t *codes = (int8_t *)r->codes;
    const uint8_t *mask = r->mask, *table = r->table;
    const int8_t thaw = r->thaw, freeze = r->freeze;
    if (thaw) {
        for (int64_t i = start; i < stop; i++) {
            const int8_t old = codes[i], on = old < 0 ? old : thaw, off = old < 0 ? freeze : old;
            codes[i] = mask[i] ? on : off;
        }
        return;
    }
    int64_t i = start;
#ifdef __AVX2__
    for (; i + 32 <= stop; i += 32) {
        const __m256i old = _mm256_loadu_si256((const __m256i *)(codes + i));
        const __m256i on = _mm256_cmpgt_epi8(_mm256_loadu_si256((const __m256i *)(mask + i)), _mm256_setzero_si256());
        const __m256i slots = _mm256_and_si256(old, _mm256_set1_epi8(0x7f));
        __m256i fresh = _mm256_setzero_si256();
        for (int64_t first = 0; first < r->slots; first += 16) {
            /* Out of this sixteenth: bit 7 is set, and the shuffle gives 0. */
            const __m256i index = _mm256_adds_epu8(_mm256_xor_si256(slots, _mm256_set1_epi8((char)first)), _mm256_set1_epi8(0x70));
            const __m256i off_part = _mm256_blendv_epi8(SIXTEEN(first), SIXTEEN(128 + first), old);
            const __m256i on_part = _mm256_blendv_epi8(SIXTEEN(256 + first), SIXTEEN(384 + first), old);
            fresh = _mm256_or_si256(fresh, _mm256_blendv_epi8(off_part, on_part, on));
        }
        _mm256_storeu_si256((__m256i *)(codes + i), fresh);
    }
#endif
    for (; i < stop; i++) codes[i] = (int8_t)table[(int64_t)mask[i] << 8 | (uint8_t)codes[i]];
}

/* New byte codes in place from old ones and flags (0 or 1), by a table of [flag][old code] for `slots` slots. With
 * `thaw` (below 0) all that thaw get that code, all that freeze get `freeze`, and the others stay. */
void gradpolicy_recode(uint8_t *codes, const uint8_t *mask, const uint8_t *table, int64_t size, int64_t slots,
                       int thaw, int freeze, int threads)
{
    const recoding r = {codes, mask, table, size, slots, (int8_t)thaw, (int8_t)freeze};
    in_parallel(recode_part, &r, parts_of(size), threads);
}

/* --- zeroing what is frozen */

typedef struct {
    char *values;
    const uint8_t *active; /* a byte a block; or, where `bit` is 0, a bit an entry */
    int64_t size, block;
    int32_t bytes, bit;
} clearing;

typedef struct { const clearing *each; int64_t count, *first_parts; } clearings;

#define CLEAR(TYPE) \
    for (int64_t i = 0; i < n; i++) ((TYPE *)values)[i] = flags[i] & bit ? ((TYPE *)values)[i] : 0

static void clear_entries(char *values, const uint8_t *flags, int bit, int64_t n, int bytes)
{
    if (bytes == 2) CLEAR(uint16_t);
    else if (bytes == 4) CLEAR(uint32_t);
    else CLEAR(uint64_t);
}

static void clear_by_bits(const clearing *c, int64_t start, int64_t stop)
{
    uint8_t flags[TILE];
    for (int64_t at = start; at < stop; at += TILE) {
        const int64_t n = stop - at < TILE ? stop - at : TILE;
        for (int64_t i = 0; i < n; i += 8)
            for (int bit = 0; bit < 8; bit++) flags[i + bit] = c->active[(at + i) / 8] >> bit & 1;
        clear_entries(c->values + at * c->bytes, flags, 1, n, c->bytes);
    }
}

static void clear_blocks(const clearing *c, int64_t start, int64_t stop)
{
    for (int64_t n; start < stop; start += n) {
        n = c->block - start % c->block;
        if (n > stop - start) n = stop - start;
        if (!(c->active[start / c->block] & c->bit)) memset(c->values + start * c->bytes, 0, (size_t)(n * c->bytes));
    }
}

static void clear_part(const void *context, int64_t part)
{
    const clearings *all = (const clearings *)context;
    const int64_t which = owner_of(all->first_parts, all->count, part);
    const clearing *c = all->each + which;
    const int64_t start = (part - all->first_parts[which]) * GRAIN, stop = start + GRAIN < c->size ? start + GRAIN : c->size;
    if (!c->bit) clear_by_bits(c, start, stop);
    else if (c->block > 1) clear_blocks(c, start, stop);
    else clear_entries(c->values + start * c->bytes, c->active + start, c->bit, stop - start, c->bytes);
}

/* Zeroes values (2, 4 or 8 bytes each) that are not active; `first_parts` has room for count + 1 numbers. */
void gradpolicy_clear(const clearing *each, int64_t count, int64_t *first_parts, int threads)
{
    int64_t entries = 0;
    first_parts[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        first_parts[i + 1] = first_parts[i] + parts_of(each[i].size);
        entries += each[i].size;
    }
    const clearings all = {each, count, first_parts};
    share_out(clear_part, &all, first_parts[count], entries / (PARTS_PER_THREAD * GRAIN), threads);
}

#include "kernel_packed.c"

/* --- new masks of many tensors */

typedef struct { uint8_t *codes; const uint8_t *flags; int64_t size, set, differs; } flagged;

/* Fills in how many flags of each are set, and whether they differ from the signs of its codes; `room` has a number for
 * each GRAIN of the largest. */
void gradpolicy_survey_many(flagged *each, int64_t count, int64_t *room, int threads)
{
    for (int64_t i = 0; i < count; i++) {
        flagged *f = each + i;
        int differs;
        f->set = gradpolicy_survey(f->flags, f->codes, room, f->size, 0, &differs, threads);
        f->differs = differs;
    }
}

/* `gradpolicy_recode` of each, by one table. */
void gradpolicy_recode_many(const flagged *each, int64_t count, const uint8_t *table, int64_t slots, int thaw, int freeze,
                            int threads)
{
    for (int64_t i = 0; i < count; i++)
        gradpolicy_recode(each[i].codes, each[i].flags, table, each[i].size, slots, thaw, freeze, threads);
}
