/* Memory for active entries alone: bits that say which are held, and moves between sets of held entries.
 * kernel.c includes this. */
#include <sched.h>
#include <stdlib.h>

/* Bit `shift` of each of eight bytes; the product gathers their lowest bits. */
static inline uint8_t gathered(uint64_t eight, int shift)
{
    return (uint8_t)(((eight >> shift & 0x0101010101010101ull) * 0x0102040810204080ull) >> 56);
}

typedef struct {
    const uint8_t *flags, *codes, *known; /* codes or bits to compare with, or NULL */
    uint8_t *bits;                        /* filled, or NULL */
    int64_t *counts, size;
    int shift, *differ;
} survey;

static void survey_part(const void *context, int64_t part)
{
    const survey *s = (const survey *)context;
    const int64_t start = part * GRAIN, stop = start + GRAIN < s->size ? start + GRAIN : s->size;
    const int compares = (s->codes || s->known) && !__atomic_load_n(s->differ, __ATOMIC_RELAXED);
    int64_t count = 0, base = start;
    uint32_t other = 0;
#ifdef __AVX2__
    const __m128i to_sign = _mm_cvtsi32_si128(7 - s->shift);
    for (; base + 32 <= stop; base += 32) {
        const __m256i flags = _mm256_loadu_si256((const __m256i *)(s->flags + base));
        const uint32_t word = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(flags, to_sign));
        uint32_t known = word;
        if (compares && s->known) memcpy(&known, s->known + base / 8, 4);
        else if (compares) known = (uint32_t)_mm256_movemask_epi8(_mm256_loadu_si256((const __m256i *)(s->codes + base)));
        other |= word ^ known;
        if (s->bits) memcpy(s->bits + base / 8, &word, 4);
        count += __builtin_popcount(word);
    }
#endif
    for (; base < stop; base += 8) {
        const uint8_t byte = gathered(eight_at(s->flags + base, stop - base), s->shift);
        if (compares) other |= byte ^ (s->known ? s->known[base / 8] : gathered(eight_at(s->codes + base, stop - base), 7));
        if (s->bits) s->bits[base / 8] = byte;
        count += __builtin_popcount(byte);
    }
    s->counts[part] = count;
    if (other) __atomic_store_n(s->differ, 1, __ATOMIC_RELAXED);
}

/* One look at flags (bit `shift` of each byte): how many are set in each GRAIN, which is returned in all; the flags as
 * bits, where there is room for them; and whether they differ from the signs of codes, or from known bits. */
int64_t gradpolicy_survey(const uint8_t *flags, const uint8_t *codes, const uint8_t *known, uint8_t *bits,
                          int64_t *counts, int64_t size, int shift, int *differ, int threads)
{
    const survey s = {flags, codes, known, bits, counts, size, shift, differ};
    int64_t count = 0;
    *differ = 0;
    in_parallel(survey_part, &s, parts_of(size), threads);
    for (int64_t part = 0; part < parts_of(size); part++) count += counts[part];
    return count;
}

/* --- one part
 *
 * Several streams move at once: what is read off the bits (what stays, and where to) is the same for all. */

#define STREAMS 4 /* codes, two moments and AMSGrad's maximum */

typedef struct { const char *old; char *result; int32_t bytes, newcomer; } stream;

typedef struct {
    const uint8_t *old_bits, *new_bits;
    const int64_t *old_offsets, *new_offsets;
    const stream *streams;
    int64_t size;
    int32_t count, row_bytes; /* streams, and what an entry takes in all of them */
} repacking;

/* Where a part's values are read and written. */
typedef struct {
    const char *from[STREAMS];
    char *to[STREAMS];
    int64_t leaving, coming;
    const char *soon[STREAMS]; /* what will be read after this part, to be fetched meanwhile; or NULL */
    int64_t soon_bytes[STREAMS]; /* for each 64 entries of this part */
} passage;

static inline int64_t ranked(uint64_t word, int bit) { return __builtin_popcountll(word & ((1ull << bit) - 1)); }

ALWAYS void copy_value(char *to, const char *from, int bytes)
{
    if (bytes == 1) memcpy(to, from, 1);
    else if (bytes == 2) memcpy(to, from, 2);
    else if (bytes == 4) memcpy(to, from, 4);
    else memcpy(to, from, 8);
}

ALWAYS void fill_values(char *to, int64_t count, int bytes, int newcomer)
{
    const int64_t value = newcomer;
    if (bytes == 1) memset(to, newcomer, (size_t)count);
    else if (!newcomer) memset(to, 0, (size_t)(count * bytes));
    else for (int64_t i = 0; i < count; i++) copy_value(to + i * bytes, (const char *)&value, bytes);
}

#ifdef __AVX2__
#define ABSENT 0x80

/* places[byte]: the bits that are set, in order. ranks[byte]: for each bit how many are set below it, or ABSENT. */
static uint8_t places[256][8], ranks[256][8];

__attribute__((constructor)) static void fill_tables(void)
{
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, rank = 0; bit < 8; bit++) {
            ranks[byte][bit] = ABSENT;
            if (!(byte >> bit & 1)) continue;
            places[byte][rank] = (uint8_t)bit;
            ranks[byte][bit] = (uint8_t)rank++;
        }
}

/* Eight values: `index` says which of the old ones comes where, ABSENT where a newcomer does. */
ALWAYS void eight_values(char *to, const char *from, __m128i index, int bytes, int newcomer)
{
    if (bytes == 4) {
        const __m256i wide = _mm256_cvtepi8_epi32(index);
        const __m256 old = _mm256_permutevar8x32_ps(_mm256_loadu_ps((const float *)from), wide);
        const __m256 fresh = _mm256_castsi256_ps(_mm256_set1_epi32(newcomer));
        _mm256_storeu_ps((float *)to, _mm256_blendv_ps(old, fresh, _mm256_castsi256_ps(wide)));
    } else {
        const __m128i old = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from), index);
        _mm_storel_epi64((__m128i *)to, _mm_blendv_epi8(old, _mm_set1_epi8((char)newcomer), index));
    }
}

/* 64 entries; eight values behind the last are read, and written over. */
ALWAYS void sixty_four(const int *newcomers, passage at, uint64_t had, uint64_t wanted, int count, const int *bytes)
{
    for (int bit = 0; bit < 64; bit += 8) {
        const unsigned leave = had >> bit & 0xff, come = wanted >> bit & 0xff;
        const __m128i rank = _mm_loadl_epi64((const __m128i *)ranks[leave]);
        const __m128i index = _mm_shuffle_epi8(rank, _mm_loadl_epi64((const __m128i *)places[come]));
        for (int k = 0; k < count; k++) {
            eight_values(at.to[k], at.from[k], index, bytes[k], newcomers[k]);
            at.from[k] += __builtin_popcount(leave) * bytes[k];
            at.to[k] += __builtin_popcount(come) * bytes[k];
        }
    }
}

#define VECTOR_REPACK 1
#else
#define VECTOR_REPACK 0
static void sixty_four(const int *newcomers, passage at, uint64_t had, uint64_t wanted, int count, const int *bytes)
{
    (void)newcomers, (void)at, (void)had, (void)wanted, (void)count, (void)bytes;
}
#endif

static inline uint64_t held_at(const uint8_t *bits, int64_t base, int64_t size)
{
    const uint64_t word = bits ? word_at(bits, base, size) : ~0ull;
    return size - base < 64 ? word & ((1ull << (size - base)) - 1) : word;
}

/* Entries held before a part; `offsets` is NULL where all are. */
static inline int64_t held_before(const repacking *r, const int64_t *offsets, int64_t part)
{
    const int64_t start = part * GRAIN < r->size ? part * GRAIN : r->size;
    return offsets ? offsets[part] : start;
}

/* What stays of 64 entries goes to its new place, the newcomers being there. */
ALWAYS void one_by_one(const passage *at, uint64_t had, uint64_t wanted, int count, const int *bytes)
{
    for (uint64_t stays = had & wanted; stays; stays &= stays - 1) {
        const int bit = __builtin_ctzll(stays);
        const int64_t to = ranked(wanted, bit), from = ranked(had, bit);
        for (int k = 0; k < count; k++) copy_value(at->to[k] + to * bytes[k], at->from[k] + from * bytes[k], bytes[k]);
    }
}

/* Memory is slower than the work on a part: meanwhile it can bring what comes next. */
ALWAYS void fetch_ahead(passage *at, int count)
{
    for (int k = 0; k < count; k++) {
        for (int64_t byte = 0; byte < at->soon_bytes[k]; byte += 64) __builtin_prefetch(at->soon[k] + byte, 0, 2);
        at->soon[k] += at->soon_bytes[k];
    }
}

/* `vectors`: by the eight, else all newcomers at once and then what stays, which is less work where that is little. */
ALWAYS void repack_as(const repacking *r, int64_t part, passage at, int vectors, int count, const int *bytes)
{
    const int64_t stop = (part + 1) * GRAIN < r->size ? (part + 1) * GRAIN : r->size;
    int64_t left = at.leaving, room = at.coming;
    int newcomers[STREAMS];
    for (int k = 0; k < count; k++) newcomers[k] = r->streams[k].newcomer;
    for (int k = 0; !vectors && k < count; k++) fill_values(at.to[k], room, bytes[k], newcomers[k]);
    for (int64_t base = part * GRAIN; base < stop; base += 64) {
        const uint64_t had = held_at(r->old_bits, base, r->size), wanted = held_at(r->new_bits, base, r->size);
        if (at.soon[0]) fetch_ahead(&at, count);
        const int64_t leave = __builtin_popcountll(had), come = __builtin_popcountll(wanted);
        if (vectors && left >= leave + 8 && room >= come + 8) sixty_four(newcomers, at, had, wanted, count, bytes);
        else {
            for (int k = 0; vectors && k < count; k++) fill_values(at.to[k], come, bytes[k], newcomers[k]);
            one_by_one(&at, had, wanted, count, bytes);
        }
        for (int k = 0; k < count; k++) {
            at.from[k] += leave * bytes[k];
            at.to[k] += come * bytes[k];
        }
        left -= leave, room -= come;
    }
}

/* Fills a part of the results; `at.from` are the values held in this part before. Common cases are compiled apart. */
static void repack_from(const repacking *r, int64_t part, passage at)
{
    static const int adam[] = {1, 4, 4}, amsgrad[] = {1, 4, 4, 4};
    const stream *s = r->streams;
    int bytes[STREAMS], small = 1, usual = s[0].bytes == 1;
    for (int k = 0; k < r->count; k++) {
        bytes[k] = s[k].bytes;
        small &= s[k].bytes == 1 || s[k].bytes == 4;
        usual &= k == 0 || s[k].bytes == 4;
    }
    const int vectors = VECTOR_REPACK && small && at.leaving * at.coming > (int64_t)GRAIN * GRAIN / 64;
    if (usual && r->count == 3 && vectors) repack_as(r, part, at, 1, 3, adam);
    else if (usual && r->count == 3) repack_as(r, part, at, 0, 3, adam);
    else if (usual && r->count == 4 && vectors) repack_as(r, part, at, 1, 4, amsgrad);
    else if (vectors) repack_as(r, part, at, 1, r->count, bytes);
    else repack_as(r, part, at, 0, r->count, bytes);
}

/* Where a part is written to, and how many values leave and come. */
static passage passage_of(const repacking *r, int64_t part)
{
    const int64_t from = held_before(r, r->old_offsets, part), to = held_before(r, r->new_offsets, part);
    passage at = {.leaving = held_before(r, r->old_offsets, part + 1) - from,
                  .coming = held_before(r, r->new_offsets, part + 1) - to};
    for (int k = 0; k < r->count; k++) {
        at.from[k] = r->streams[k].old + from * r->streams[k].bytes;
        at.to[k] = r->streams[k].result + to * r->streams[k].bytes;
    }
    return at;
}

static void repack_part(const void *context, int64_t part)
{
    const repacking *r = (const repacking *)context;
    repack_from(r, part, passage_of(r, part));
}

/* --- in place: fresh memory costs more than the move itself
 *
 * A part is copied out, then written to its new place. What it is written over must have been copied out before:
 * where the new memory of part p + 1 begins further on than the old one did, p + 1 goes before p, else p before
 * p + 1. Each order follows from its neighbours alone, so there always is one. Threads take parts in that order;
 * before one writes it waits for the parts before its own, of which only the other threads' present ones can be
 * unfinished. */

typedef struct {
    const repacking *r;
    const int64_t *order;
    int64_t parts, *next;
    int threads;
    char *copies;
    uint8_t *copied;
} moving;

static void copy_out(const moving *m, passage *at, int64_t thread)
{
    char *copy = m->copies + thread * (GRAIN * m->r->row_bytes + 8192);
    for (int k = 0; k < m->r->count; k++) {
        const int64_t bytes = at->leaving * m->r->streams[k].bytes;
        memcpy(copy, at->from[k], (size_t)bytes);
        at->from[k] = copy;
        copy += GRAIN * m->r->streams[k].bytes + 1088;
    }
}

static void fetch_next(const moving *m, int64_t turn, passage *at)
{
    const passage next = passage_of(m->r, m->order[turn]);
    for (int k = 0; k < m->r->count; k++) {
        at->soon[k] = next.from[k];
        at->soon_bytes[k] = next.leaving * m->r->streams[k].bytes / (GRAIN / 64);
    }
}

static void move_parts(const void *context, int64_t thread)
{
    const moving *m = (const moving *)context;
    for (int64_t turn; (turn = __atomic_fetch_add(m->next, 1, __ATOMIC_RELAXED)) < m->parts;) {
        passage at = passage_of(m->r, m->order[turn]);
        copy_out(m, &at, thread);
        __atomic_store_n(m->copied + turn, 1, __ATOMIC_RELEASE);
        for (int64_t other = turn < m->threads ? 0 : turn - m->threads; other < turn; other++)
            while (!__atomic_load_n(m->copied + other, __ATOMIC_ACQUIRE)) sched_yield();
        if (turn + m->threads < m->parts) fetch_next(m, turn + m->threads, &at);
        repack_from(m->r, m->order[turn], at);
    }
}

static void order_parts(const repacking *r, int64_t *order, int64_t parts)
{
    for (int64_t first = 0, last; first < parts; first = last + 1) {
        for (last = first; last + 1 < parts && r->new_offsets[last + 1] > r->old_offsets[last + 1];) last++;
        for (int64_t part = last; part >= first; part--) *order++ = part;
    }
}

static int repack_in_place(const repacking *r, int64_t parts, int threads)
{
    const int64_t worth = parts / PARTS_PER_THREAD, together = worth < threads ? worth : threads, team = together < 1 ? 1 : together;
    int64_t next = 0, *order = malloc((size_t)parts * sizeof *order);
    char *copies = malloc((size_t)(team * (GRAIN * r->row_bytes + 8192)));
    uint8_t *copied = calloc((size_t)parts, 1);
    const int possible = order && copies && copied;
    if (possible) {
        order_parts(r, order, parts);
        const moving m = {r, order, parts, &next, (int)team, copies, copied};
        share_out(move_parts, &m, team, team, threads);
    }
    free(order);
    free(copies);
    free(copied);
    return possible;
}

/* Moves values from the entries held before to those held now; newcomers get a whole number. NULL bits: all are held.
 * Each result may be `old` where neither is NULL bits. Returns 0 where it could not, with nothing written. */
int gradpolicy_repack(const uint8_t *old_bits, const int64_t *old_offsets, const uint8_t *new_bits,
                      const int64_t *new_offsets, const stream *streams, int count, int64_t size, int threads)
{
    repacking r = {old_bits, new_bits, old_offsets, new_offsets, streams, size, count, 0};
    int in_place = 0;
    for (int k = 0; k < count; k++) {
        r.row_bytes += streams[k].bytes;
        in_place |= streams[k].old == streams[k].result;
    }
    if (count < 1 || count > STREAMS) return 0;
    if (in_place && size) return repack_in_place(&r, parts_of(size), threads);
    in_parallel(repack_part, &r, parts_of(size), threads);
    return 1;
}
