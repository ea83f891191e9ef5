/* What all kernels share: types, packed bits, and the split of the work between threads. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 256    /* entries that are computed at once, in the first-level cache */
#define PART 16384  /* entries that are worth a thread's while */
#define LINE 64      /* bytes that a processor reads at once */
#define FETCHED 2048 /* bytes of a block that are read ahead; the processor foresees the rest */
#define MAX_STATES 3 /* tensors of state that a rule may keep */
#define MAX_SETTINGS 16 /* numbers of a rule that are the same for all entries */

enum { FLOAT32, FLOAT64, BFLOAT16 };

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int is_set(const uint8_t *bits, int64_t i) { return bits[i / 8] >> (i % 8) & 1; }

/* Bits are padded to whole words, which begin on any byte. */
static inline uint64_t word_of(const uint8_t *bits, int64_t word)
{
    uint64_t value;
    memcpy(&value, bits + 8 * word, 8);
    return value;
}

/* How many of the first bits are set; `count` is a multiple of 64. */
static int64_t count_bits(const uint8_t *bits, int64_t count)
{
    int64_t found = 0;
    for (int64_t word = 0; word < count / 64; word++) found += __builtin_popcountll(word_of(bits, word));
    return found;
}

static inline int64_t age_of(const void *ages, int32_t bytes, int64_t i)
{
    return bytes == 2 ? ((const int16_t *)ages)[i] : ((const int32_t *)ages)[i];
}

static inline void set_age(void *ages, int32_t bytes, int64_t i, int64_t age)
{
    if (bytes == 2) ((int16_t *)ages)[i] = (int16_t)age;
    else ((int32_t *)ages)[i] = (int32_t)age;
}

/* Into how many parts a tensor is cut. Few, since each counts the bits that come before its own. */
static int64_t parts_of(int64_t blocks, int64_t block, int threads)
{
    const int64_t worthwhile = blocks * block / PART;
    return worthwhile < 1 ? 1 : smaller(worthwhile, 8 * threads);
}

/* Where a part begins: on a multiple of 64 blocks, so that no two threads share a word of bits. */
static int64_t start_of(int64_t part, int64_t parts, int64_t blocks)
{
    return part >= parts ? blocks : blocks * part / parts / 64 * 64;
}

/* Calls `work(job, first block, last block)` for parts of all jobs, which have `blocks` and `block`. */
#define FOR_ALL_PARTS(jobs, count, threads, work)                                             \
    do {                                                                                      \
        int64_t *first = malloc(((count) + 1) * sizeof(int64_t));                             \
        first[0] = 0;                                                                         \
        for (int64_t i = 0; i < (count); i++)                                                 \
            first[i + 1] = first[i] + parts_of((jobs)[i].blocks, (jobs)[i].block, threads);   \
        const int64_t all = first[count];                                                     \
        _Pragma("omp parallel for schedule(dynamic, 1) num_threads(threads) if (all > (count))") \
        for (int64_t i = 0; i < all; i++) {                                                   \
            int64_t low = 0, high = (count);                                                  \
            while (high - low > 1) {                                                          \
                const int64_t middle = (low + high) / 2;                                      \
                if (first[middle] <= i) low = middle;                                         \
                else high = middle;                                                           \
            }                                                                                 \
            const int64_t part = i - first[low], parts = first[low + 1] - first[low];         \
            const int64_t blocks = (jobs)[low].blocks;                                        \
            work(&(jobs)[low], start_of(part, parts, blocks), start_of(part + 1, parts, blocks)); \
        }                                                                                     \
        free(first);                                                                          \
    } while (0)
