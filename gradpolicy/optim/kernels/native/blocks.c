/* What a mask does to ages, state and gradients, a block of consecutive entries at a time. */
#include "common.h"

typedef struct {
    void *values;            /* dense: what is read, or written to */
    void *packed;            /* values of active blocks alone, one after the other; or a second dense vector */
    void *ages;              /* signed: above 0 a block is active */
    uint8_t *active;         /* a bit a block: which blocks are active, where there are no ages */
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

/* --- pack_bits: a bit for each flag; blocks beyond the last are 0. */

static void pack_bits_part(const block_job *j, int64_t first, int64_t last)
{
    for (int64_t start = first; start < last; start += 64) {
        uint64_t word = 0;
        for (int64_t b = start; b < smaller(start + 64, last); b++) word |= (uint64_t)(j->flags[b] != 0) << (b - start);
        memcpy(j->active + start / 8, &word, 8);
    }
}

void pack_bits(const block_job *jobs, int64_t count, int threads) { FOR_ALL_PARTS(jobs, count, threads, pack_bits_part); }

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

/* --- compress, expand: between all blocks and active ones alone. */

#define COMPRESS(type)                                                                          \
    do {                                                                                        \
        const type *values = j->values;                                                         \
        type *packed = (type *)j->packed + count_bits(j->active, first) * j->block;             \
        if (j->block == 1)                                                                      \
            for (int64_t word = first / 64; word * 64 < last; word++)                           \
                for (uint64_t left = word_of(j->active, word); left; left &= left - 1)          \
                    *packed++ = values[word * 64 + __builtin_ctzll(left)];                      \
        else                                                                                    \
            for (int64_t b = first; b < last; b++) {                                            \
                if (!is_set(j->active, b)) continue;                                            \
                memcpy(packed, values + b * j->block, j->block * sizeof(type));                 \
                packed += j->block;                                                             \
            }                                                                                   \
    } while (0)

#define EXPAND(type)                                                                            \
    do {                                                                                        \
        type *values = j->values;                                                               \
        const type *packed = (const type *)j->packed + count_bits(j->active, first) * j->block; \
        type fill;                                                                              \
        memcpy(&fill, &j->fill, sizeof fill);                                                   \
        for (int64_t i = first * j->block; i < last * j->block; i++) values[i] = fill;          \
        if (j->block == 1)                                                                      \
            for (int64_t word = first / 64; word * 64 < last; word++)                           \
                for (uint64_t left = word_of(j->active, word); left; left &= left - 1)          \
                    values[word * 64 + __builtin_ctzll(left)] = *packed++;                      \
        else                                                                                    \
            for (int64_t b = first; b < last; b++) {                                            \
                if (!is_set(j->active, b)) continue;                                            \
                memcpy(values + b * j->block, packed, j->block * sizeof(type));                 \
                packed += j->block;                                                             \
            }                                                                                   \
    } while (0)

static void compress_part(const block_job *j, int64_t first, int64_t last)
{
    if (j->item_bytes == 2) COMPRESS(int16_t);
    else if (j->item_bytes == 4) COMPRESS(int32_t);
    else COMPRESS(int64_t);
}

static void expand_part(const block_job *j, int64_t first, int64_t last)
{
    if (j->item_bytes == 2) EXPAND(int16_t);
    else if (j->item_bytes == 4) EXPAND(int32_t);
    else EXPAND(int64_t);
}

void compress(const block_job *jobs, int64_t count, int threads) { FOR_ALL_PARTS(jobs, count, threads, compress_part); }

void expand(const block_job *jobs, int64_t count, int threads) { FOR_ALL_PARTS(jobs, count, threads, expand_part); }
