/* Random bits from hashed indices, for a CPU: the arithmetic of seeded.py, compiled. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define MOST_THREADS 64
#define TILE 256

typedef struct {
    uint8_t *drawn;
    int64_t first, last; /* positions in drawn */
    uint32_t start, low, high, threshold;
} part;

/* A tile in two loops, which compilers turn into vector instructions where one would stay scalar. */
static inline void draw_tile(uint8_t *drawn, uint32_t first, uint32_t low, uint32_t high, int32_t threshold)
{
    int32_t below[TILE];
    for (uint32_t i = 0; i < TILE; i++) {
        uint32_t word = (first + i) ^ low;
        word = (word ^ (word >> 17)) * 0xed5ad4bbu + high;
        word = (word ^ (word >> 11)) * 0xac4c1b51u;
        word = (word ^ (word >> 15)) * 0x31848babu;
        word ^= word >> 14;
        below[i] = (int32_t)(word ^ 0x80000000u) < threshold; /* the order of unsigned words */
    }
    for (uint32_t i = 0; i < TILE; i++) drawn[i] = (uint8_t)below[i];
}

static void *draw(void *argument)
{
    const part *p = argument;
    const int32_t threshold = (int32_t)(p->threshold ^ 0x80000000u);
    int64_t at = p->first;
    for (; at + TILE <= p->last; at += TILE)
        draw_tile(p->drawn + at, p->start + (uint32_t)at, p->low, p->high, threshold);
    if (at < p->last) {
        uint8_t rest[TILE];
        draw_tile(rest, p->start + (uint32_t)at, p->low, p->high, threshold);
        memcpy(p->drawn + at, rest, p->last - at);
    }
    return 0;
}

/* Writes count flags: whether the hash of start, start + 1, ... lies below the threshold. */
void gradpolicy_draw(
    uint8_t *drawn, int64_t count, uint32_t start, uint32_t low, uint32_t high, uint32_t threshold, int32_t threads)
{
    pthread_t ids[MOST_THREADS];
    part parts[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1 || count < (1 << 18)) threads = 1;
    for (int32_t t = 0; t < threads; t++) {
        parts[t] = (part){drawn, count * t / threads, count * (t + 1) / threads, start, low, high, threshold};
        started[t] = t > 0 && pthread_create(&ids[t], 0, draw, &parts[t]) == 0;
        if (t > 0 && !started[t]) draw(&parts[t]);
    }
    draw(&parts[0]);
    for (int32_t t = 1; t < threads; t++)
        if (started[t]) pthread_join(ids[t], 0);
}
