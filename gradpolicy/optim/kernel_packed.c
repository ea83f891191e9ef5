/* Memory for active entries alone: bits that say which are held, and moves between sets of held entries.
 * kernel.c includes this. */
#include <stdlib.h>

typedef struct { const uint8_t *flags; uint8_t *bits; int64_t *counts, size; int shift; } bitting;

static void bits_part(const void *context, int64_t part)
{
    const bitting *b = (const bitting *)context;
    const int64_t start = part * GRAIN, stop = start + GRAIN < b->size ? start + GRAIN : b->size;
    int64_t count = 0, base = start;
#ifdef __AVX2__
    const __m128i to_sign = _mm_cvtsi32_si128(7 - b->shift);
    for (; base + 32 <= stop; base += 32) {
        const __m256i flags = _mm256_loadu_si256((const __m256i *)(b->flags + base));
        const uint32_t word = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(flags, to_sign));
        memcpy(b->bits + base / 8, &word, 4);
        count += __builtin_popcount(word);
    }
#endif
    for (; base < stop; base += 8) {
        /* The product gathers the lowest bit of each byte. */
        const uint64_t eight = eight_at(b->flags + base, stop - base);
        const uint8_t byte = (uint8_t)(((eight >> b->shift & 0x0101010101010101ull) * 0x0102040810204080ull) >> 56);
        b->bits[base / 8] = byte;
        count += __builtin_popcount(byte);
    }
    b->counts[part] = count;
}

/* Bit `shift` of each byte, eight a byte, and how many are set in each GRAIN. */
void gradpolicy_bits(const uint8_t *flags, uint8_t *bits, int64_t *counts, int64_t size, int shift, int threads)
{
    const bitting b = {flags, bits, counts, size, shift};
    in_parallel(bits_part, &b, parts_of(size), threads);
}

/* --- one part */

typedef struct {
    const uint8_t *old_bits, *new_bits;
    const int64_t *old_offsets, *new_offsets;
    const char *old;
    char *result;
    int64_t size;
    int32_t bytes, newcomer;
} repacking;

static inline int64_t ranked(uint64_t word, int bit) { return __builtin_popcountll(word & ((1ull << bit) - 1)); }

#ifdef __AVX2__
#define ABSENT 0x80
#define FEW 6 /* values to move: below this, one by one is as fast */

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

/* Spreads eight old values to where their bits are, and draws those together that are wanted. */
ALWAYS void eight_words(const char *from, char *to, const uint8_t *spread, const uint8_t *draw, int newcomer)
{
    const __m256i rank = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)spread));
    const __m256i place = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)draw));
    const __m256i old = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)from), rank);
    const __m256 all = _mm256_blendv_ps(
        _mm256_castsi256_ps(old), _mm256_castsi256_ps(_mm256_set1_epi32(newcomer)), _mm256_castsi256_ps(rank));
    _mm256_storeu_ps((float *)to, _mm256_permutevar8x32_ps(all, place));
}

ALWAYS void eight_bytes(const char *from, char *to, const uint8_t *spread, const uint8_t *draw, int newcomer)
{
    const __m128i rank = _mm_loadl_epi64((const __m128i *)spread), place = _mm_loadl_epi64((const __m128i *)draw);
    const __m128i old = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)from), rank);
    const __m128i all = _mm_blendv_epi8(old, _mm_set1_epi8((char)newcomer), rank);
    _mm_storel_epi64((__m128i *)to, _mm_shuffle_epi8(all, place));
}

/* 64 entries at once; 0 where that does not pay. Eight values behind the last are read, and written as newcomers. */
ALWAYS int vector_repack(const void *old, void *result, uint64_t had, uint64_t wanted, int bytes, int newcomer)
{
    if ((bytes != 4 && bytes != 1) || __builtin_popcountll(had & wanted) < FEW) return 0;
    const char *from = (const char *)old;
    char *to = (char *)result;
    for (int bit = 0; bit < 64; bit += 8) {
        const unsigned leave = had >> bit & 0xff, come = wanted >> bit & 0xff;
        if (bytes == 4) eight_words(from, to, ranks[leave], places[come], newcomer);
        else eight_bytes(from, to, ranks[leave], places[come], newcomer);
        from += __builtin_popcount(leave) * bytes;
        to += __builtin_popcount(come) * bytes;
    }
    if (bytes == 4) _mm256_storeu_si256((__m256i *)to, _mm256_set1_epi32(newcomer));
    else _mm_storel_epi64((__m128i *)to, _mm_set1_epi8((char)newcomer));
    return 1;
}
#else
static int vector_repack(const void *old, void *result, uint64_t had, uint64_t wanted, int bytes, int newcomer)
{
    return (void)old, (void)result, (void)had, (void)wanted, (void)bytes, (void)newcomer, 0;
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

/* Newcomers first: of the whole part where words hold few, else of a word; then what stays, at its new place. */
#define REPACK(TYPE) do { \
    const TYPE *from = (const TYPE *)old, *from_end = from + leaving; \
    TYPE *to = (TYPE *)r->result + held_before(r, r->new_offsets, part), *to_end = to + coming; \
    const int at_once = coming < GRAIN / 4; \
    for (int64_t i = 0; at_once && i < coming; i++) to[i] = (TYPE)r->newcomer; \
    for (int64_t base = part * GRAIN; base < stop; base += 64) { \
        const uint64_t had = held_at(r->old_bits, base, r->size), wanted = held_at(r->new_bits, base, r->size); \
        const int leave = __builtin_popcountll(had), come = __builtin_popcountll(wanted); \
        const int roomy = from_end - from >= leave + 8 && to_end - to >= come + 8; \
        if (had == wanted) memcpy(to, from, (size_t)come * sizeof(TYPE)); \
        else if (!roomy || !vector_repack(from, to, had, wanted, sizeof(TYPE), r->newcomer)) { \
            for (int i = 0; !at_once && i < come; i++) to[i] = (TYPE)r->newcomer; \
            for (uint64_t stays = had & wanted; stays; stays &= stays - 1) { \
                const int bit = __builtin_ctzll(stays); \
                to[ranked(wanted, bit)] = from[ranked(had, bit)]; \
            } \
        } \
        from += leave; \
        to += come; \
    } } while (0)

/* Fills a part of the result; `old` are the values held in this part before. */
static void repack_from(const repacking *r, int64_t part, const void *old)
{
    const int64_t stop = (part + 1) * GRAIN < r->size ? (part + 1) * GRAIN : r->size;
    const int64_t leaving = held_before(r, r->old_offsets, part + 1) - held_before(r, r->old_offsets, part);
    const int64_t coming = held_before(r, r->new_offsets, part + 1) - held_before(r, r->new_offsets, part);
    if (r->bytes == 1) REPACK(uint8_t);
    else if (r->bytes == 2) REPACK(uint16_t);
    else if (r->bytes == 4) REPACK(uint32_t);
    else REPACK(uint64_t);
}

static void repack_part(const void *context, int64_t part)
{
    const repacking *r = (const repacking *)context;
    repack_from(r, part, r->old + held_before(r, r->old_offsets, part) * r->bytes);
}

/* --- in place: fresh memory costs more than the move itself
 *
 * A wave of parts is copied out, then written to its new place. What a part is written over must have been copied
 * out before: where the new memory of part p + 1 begins further on than the old one did, p + 1 goes before p, else
 * p before p + 1. Each order follows from its neighbours alone, so there always is one. */

typedef struct { const repacking *r; const int64_t *order; char *copies; } wave;

static void copy_out(const void *context, int64_t place)
{
    const wave *w = (const wave *)context;
    const repacking *r = w->r;
    const int64_t from = r->old_offsets[w->order[place]], to = r->old_offsets[w->order[place] + 1];
    memcpy(w->copies + place * GRAIN * r->bytes, r->old + from * r->bytes, (size_t)((to - from) * r->bytes));
}

static void write_back(const void *context, int64_t place)
{
    const wave *w = (const wave *)context;
    repack_from(w->r, w->order[place], w->copies + place * GRAIN * w->r->bytes);
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
    const int64_t together = 4 * (threads < 1 ? 1 : threads > 16 ? 16 : threads);
    int64_t *order = malloc((size_t)parts * sizeof *order);
    char *copies = malloc((size_t)(together < parts ? together : parts) * GRAIN * (size_t)r->bytes);
    const int possible = order && copies;
    if (possible) order_parts(r, order, parts);
    for (int64_t first = 0; possible && first < parts; first += together) {
        const wave w = {r, order + first, copies};
        const int64_t count = parts - first < together ? parts - first : together;
        in_parallel(copy_out, &w, count, threads);
        in_parallel(write_back, &w, count, threads);
    }
    free(order);
    free(copies);
    return possible;
}

/* Moves values from the entries held before to those held now; newcomers get a whole number. NULL bits: all are held.
 * `result` may be `old` where neither is NULL bits. Returns 0 where it could not, with nothing written. */
int gradpolicy_repack(const uint8_t *old_bits, const int64_t *old_offsets, const uint8_t *new_bits,
                      const int64_t *new_offsets, const void *old, void *result, int64_t size, int32_t bytes,
                      int newcomer, int threads)
{
    const repacking r = {old_bits, new_bits, old_offsets, new_offsets, (const char *)old, (char *)result, size, bytes, newcomer};
    const int64_t parts = parts_of(size);
    if (old == result && parts) return repack_in_place(&r, parts, threads);
    in_parallel(repack_part, &r, parts, threads);
    return 1;
}
