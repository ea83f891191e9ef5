/* What a mask does to ages, state and gradients, a block of consecutive entries at a time. */
#include "common.h"
#ifdef __AVX512BW__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

typedef struct {
    void *values;            /* what is read, or filled */
    void *packed;            /* what is written to by repack; or a second dense vector */
    void *ages;              /* signed: above 0 a block is active */
    const uint8_t *active;   /* a bit a block: which blocks are active, where there are no ages; NULL: all */
    const uint8_t *target;   /* the same for what is written */
    const uint8_t *flags;    /* a byte a block: the new mask */
    int64_t fill;            /* the bits of what frozen blocks get */
    int64_t blocks, block;
    int32_t age_bytes, item_bytes, forgets, updates;
} block_job;

static inline int is_active(const block_job *j, int64_t b)
{
    return j->ages ? age_of(j->ages, j->age_bytes, b) > 0 : is_set(j->active, b);
}

/* --- turn: active blocks have had so many updates; then a new mask turns the signs of ages.
 *     A block that freezes and forgets is of age 0, which is written -1. */

#define TURN(type)                                                                        \
    do {                                                                                  \
        type *ages = j->ages;                                                             \
        const type updates = (type)j->updates;                                            \
        for (int64_t b = first; b < last; b++) {                                          \
            const type size = ages[b] < 0 ? -ages[b] : ages[b] + updates;                 \
            const type frozen = j->forgets ? -1 : -size;                                  \
            ages[b] = j->flags[b] ? size : frozen;                                        \
        }                                                                                 \
    } while (0)

static void turn_part(const block_job *j, int64_t first, int64_t last)
{
    if (j->age_bytes == 2) TURN(int16_t);
    else TURN(int32_t);
}

void turn(const block_job *jobs, int64_t count, int threads) { FOR_ALL_PARTS(jobs, count, threads, turn_part); }

/* --- fill_frozen: frozen blocks of a dense vector become a number, or what another vector has there. */

#define FILL(type)                                                                              \
    do {                                                                                        \
        type *values = j->values;                                                               \
        const type *other = j->packed;                                                          \
        type fill;                                                                              \
        memcpy(&fill, &j->fill, sizeof fill);                                                   \
        if (j->block == 1 && j->age_bytes == 2 && j->ages) {                                    \
            const int16_t *ages = j->ages;                                                      \
            if (other) for (int64_t b = first; b < last; b++) values[b] = ages[b] > 0 ? values[b] : other[b]; \
            else for (int64_t b = first; b < last; b++) values[b] = ages[b] > 0 ? values[b] : fill; \
        } else                                                                                  \
            for (int64_t b = first; b < last; b++) {                                            \
                if (is_active(j, b)) continue;                                                  \
                for (int64_t i = b * j->block; i < (b + 1) * j->block; i++) values[i] = other ? other[i] : fill; \
            }                                                                                   \
    } while (0)

static void fill_frozen_part(const block_job *j, int64_t first, int64_t last)
{
    if (j->item_bytes == 2) FILL(int16_t);
    else if (j->item_bytes == 4) FILL(int32_t);
    else FILL(int64_t);
}

void fill_frozen(const block_job *jobs, int64_t count, int threads) { FOR_ALL_PARTS(jobs, count, threads, fill_frozen_part); }

/* --- repack: values of the blocks of one index become those of another; new blocks get a number. */

/* How many blocks an index has in all; it is padded to whole words. */
int64_t count_blocks(const uint8_t *index, int64_t bits) { return count_bits(index, bits); }

/* How many of the first blocks an index has; `count` is a multiple of 64. */
static int64_t rank_of(const uint8_t *index, int64_t count) { return index ? count_bits(index, count) : count; }

static inline uint64_t blocks_of_word(const uint8_t *index, int64_t word, int64_t last)
{
    if (index) return word_of(index, word);
    return last - word * 64 >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << (last - word * 64)) - 1;
}

/* Writes the blocks of a word of an index, after those of the words before it.
 * No branch asks for a bit: half of them would be predicted wrongly. */
#define REPACK_WORD(type)                                                                       \
    static inline __attribute__((always_inline)) void repack_word_##type(                       \
        type *to, const type *from, uint64_t old, uint64_t new, int64_t block, type fill)       \
    {                                                                                           \
        const int64_t written = __builtin_popcountll(new) * block;                              \
        for (int64_t i = 0; i < written; i++) to[i] = fill;                                     \
        for (uint64_t both = old & new; both; both &= both - 1) {                               \
            const uint64_t below = (both & -both) - 1;                                          \
            memcpy(to + __builtin_popcountll(new & below) * block,                              \
                   from + __builtin_popcountll(old & below) * block, block * sizeof(type));     \
        }                                                                                       \
    }

REPACK_WORD(int16_t)
REPACK_WORD(int32_t)
REPACK_WORD(int64_t)

#ifdef __AVX512BW__
/* The same for blocks of one entry, sixteen at a time: old ones are spread out, new ones packed. */
#define REPACK_VECTORS(type, load, store)                                                       \
    static inline void repack_entries_##type(type *to, const type *from, uint64_t old, uint64_t new, type fill) \
    {                                                                                           \
        for (int done = 0; done < 64; done += 16, old >>= 16, new >>= 16) {                     \
            const int read = __builtin_popcount(old & 0xffff), written = __builtin_popcount(new & 0xffff); \
            const __m512i packed = load((1u << read) - 1, from);                                \
            const __m512i spread = _mm512_mask_expand_epi32(_mm512_set1_epi32(fill), (__mmask16)old, packed); \
            store(to, (1u << written) - 1, _mm512_maskz_compress_epi32((__mmask16)new, spread)); \
            from += read;                                                                       \
            to += written;                                                                      \
        }                                                                                       \
    }
#define LOAD_WIDENED(mask, from) _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, from))
#define STORE_NARROWED(to, mask, values) _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(values))

REPACK_VECTORS(int16_t, LOAD_WIDENED, STORE_NARROWED)
REPACK_VECTORS(int32_t, _mm512_maskz_loadu_epi32, _mm512_mask_storeu_epi32)
#else
#define repack_entries_int16_t(to, from, old, new, fill) repack_word_int16_t(to, from, old, new, 1, fill)
#define repack_entries_int32_t(to, from, old, new, fill) repack_word_int32_t(to, from, old, new, 1, fill)
#endif
#define repack_entries_int64_t(to, from, old, new, fill) repack_word_int64_t(to, from, old, new, 1, fill)

#define REPACK(type)                                                                            \
    do {                                                                                        \
        const type *from = (const type *)j->values + rank_of(j->active, first) * j->block;      \
        type *to = (type *)j->packed + rank_of(j->target, first) * j->block;                    \
        type fill;                                                                              \
        memcpy(&fill, &j->fill, sizeof fill);                                                   \
        for (int64_t word = first / 64; word * 64 < last; word++) {                             \
            const uint64_t old = blocks_of_word(j->active, word, last);                         \
            const uint64_t new = blocks_of_word(j->target, word, last);                         \
            if (j->block == 1) repack_entries_##type(to, from, old, new, fill);                 \
            else repack_word_##type(to, from, old, new, j->block, fill);                        \
            from += __builtin_popcountll(old) * j->block;                                       \
            to += __builtin_popcountll(new) * j->block;                                         \
        }                                                                                       \
    } while (0)

static void repack_part(const block_job *j, int64_t first, int64_t last)
{
    if (j->item_bytes == 2) REPACK(int16_t);
    else if (j->item_bytes == 4) REPACK(int32_t);
    else REPACK(int64_t);
}

void repack(const block_job *jobs, int64_t count, int threads) { FOR_ALL_PARTS(jobs, count, threads, repack_part); }

/* Asks the system for large pages: new memory comes several times as fast, a page at a time. */
void ask_for_large_pages(void *memory, int64_t bytes)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21, start = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (start < end) madvise((void *)start, end - start, MADV_HUGEPAGE);
#endif
}
