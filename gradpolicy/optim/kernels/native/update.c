/* The update of one rule. Compiled once for each, with -DRULE=adam -DRULE_FILE="adam.c", which defines
 *     STATES   the most tensors of state that the rule keeps
 *     NUMBERS  how many numbers follow from the age of an entry
 *     BODY     what one update does to one entry; see update.h */
#include "common.h"

typedef struct {
    void *parameter;
    const void *gradient;    /* of active blocks alone where `gradient_packed` */
    void *state[MAX_STATES]; /* NULL where the rule keeps less; of active blocks alone where `active` is set */
    const void *ages;        /* signed: above 0 a block is active; of active blocks alone where `active` is set */
    const uint8_t *active;   /* a bit a block, or NULL where state is dense */
    const void *numbers;     /* a row for each age */
    const double *settings;
    int64_t row;             /* the row of numbers for every entry, or for those whose age is 1 */
    int64_t blocks, block;   /* `block`: consecutive entries that share an age */
    int32_t age_bytes, type, shared, gradient_packed;
} update_job;

static inline float from_bfloat16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value) /* to nearest, ties to even */
{
    uint32_t wide;
    memcpy(&wide, &value, 4);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0 : rounded);
}

#define JOINED(a, b) a##b
#define EXPORTED(rule) JOINED(update_, rule)
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

#define REAL float
#define SQRT sqrtf
#define NAME(x) x##_float
#define BODY body_float
#include RULE_FILE
#include "update.h"
#undef REAL
#undef SQRT
#undef NAME
#undef BODY

#define REAL double
#define SQRT sqrt
#define NAME(x) x##_double
#define BODY body_double
#include RULE_FILE
#include "update.h"

static void update_part(const update_job *j, int64_t first, int64_t last)
{
    if (j->type == FLOAT64) part_double(j, first, last);
    else part_float(j, first, last);
}

void EXPORTED(RULE)(const update_job *jobs, int64_t count, int threads)
{
    FOR_ALL_PARTS(jobs, count, threads, update_part);
}
