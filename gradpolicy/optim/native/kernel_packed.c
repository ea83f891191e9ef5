/* Memory for active entries alone: bits that say which are held, and moves between sets of held entries.
 * kernel.c includes this. */
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

/* One look at flags (bit `shift` of each byte): how many are set in each GRAIN, which is returned in all, and whether they
 * differ from the signs of codes. */
int64_t gradpolicy_survey(const uint8_t *flags, const uint8_t *codes, int64_t *counts, int64_t size, int shift, int *differ,
                          int threads)
{
    const survey s = {flags, codes, NULL, NULL, counts, size, shift, differ};
    int64_t count = 0;
    *differ = 0;
    in_parallel(survey_part, &s, parts_of(size), threads);
    for (int64_t part = 0; part < parts_of(size); part++) count += counts[part];
    return count;
}

/* --- the index of many tensors: bits, and how many are set before each GRAIN */

typedef struct {
    const uint8_t *flags, *known; /* known: bits to compare with, or NULL */
    uint8_t *bits;
    int64_t *offsets, size, shift, set, differs; /* offsets: one more than there are parts */
} indexed;

typedef struct { indexed *each; int64_t *first_parts; int64_t count; int *differ; } indexing;

static void index_part(const void *context, int64_t part)
{
    const indexing *all = (const indexing *)context;
    const int64_t which = owner_of(all->first_parts, all->count, part);
    const indexed *i = all->each + which;
    const survey s = {i->flags, NULL, i->known, i->bits, i->offsets + 1, i->size, (int)i->shift, all->differ + which};
    survey_part(&s, part - all->first_parts[which]);
}

/* Fills in bits and offsets of each, how many are set, and whether they differ from what was known; `room` has count + 1
 * numbers, `differ` as many as there are. */
void gradpolicy_index_many(indexed *each, int64_t count, int64_t *room, int *differ, int threads)
{
    room[0] = 0;
    for (int64_t i = 0; i < count; i++) room[i + 1] = room[i] + parts_of(each[i].size);
    const indexing all = {each, room, count, memset(differ, 0, (size_t)count * sizeof *differ)};
    in_parallel(index_part, &all, room[count], threads);
    for (int64_t i = 0; i < count; i++) {
        each[i].offsets[0] = 0;
        for (int64_t part = 0; part < parts_of(each[i].size); part++) each[i].offsets[part + 1] += each[i].offsets[part];
        each[i].set = each[i].offsets[parts_of(each[i].size)];
        each[i].differs = differ[i];
    }
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
    int32_t count; /* streams */
} repacking;

/* Where a part's values are read and written. */
typedef struct {
    const char *from[STREAMS];
    char *to[STREAMS];
    int64_t leaving, coming;
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

/* --- in place: fresh memory costs more than the move itself
 *
 * The new values begin a little before or after the old ones. Threads take segments of parts, and within one go away
 * from what is still to be read, so that most parts are read where they lie. The others, at the ends of segments (all,
 * where the old and new place are too close), are copied out before anything is written. */

#define SEGMENTS_PER_THREAD 2

typedef struct {
    const repacking *r;
    int64_t parts, segments, shift; /* shift: where new values begin, counted from where the old ones do */
    int in_place, together;         /* together: whether the shift is that of every stream */
} moving;

/* Whether a stream's new values take memory of the old ones. */
static int overlap(const stream *s, int64_t old_count, int64_t new_count)
{
    return s->old < s->result + new_count * s->bytes && s->result < s->old + old_count * s->bytes;
}

/* `share`: how many segments of many tensors' parts together are worth. */
static moving moving_of(const repacking *r, double share)
{
    const int64_t parts = parts_of(r->size);
    const stream *s = r->streams;
    moving m = {.r = r, .parts = parts, .shift = (s[0].result - s[0].old) / s[0].bytes, .together = 1};
    for (int k = 0; k < r->count; k++) {
        m.in_place |= r->old_bits && r->new_bits && overlap(s + k, r->old_offsets[parts], r->new_offsets[parts]);
        m.together &= (s[k].result - s[k].old) / s[k].bytes == m.shift;
    }
    m.segments = m.in_place ? (int64_t)ceil(share * (double)parts) : parts;
    return m;
}

/* Segments a part, so that all threads have their share of all parts. */
static double share_of(int64_t parts, int threads)
{
    const int64_t worth = parts / PARTS_PER_THREAD, team = worth < threads ? worth : threads;
    return (team > 1 ? (double)team * SEGMENTS_PER_THREAD : 1) / (double)(parts > 0 ? parts : 1);
}

static int64_t segment_start(const moving *m, int64_t segment) { return segment * m->parts / m->segments; }

/* Whether values of a part of the segment first..last-1 would be written over before they are read. */
static int is_in_danger(const moving *m, int64_t part, int64_t first, int64_t last)
{
    const int64_t *old = m->r->old_offsets, *new = m->r->new_offsets;
    if (!m->in_place) return 0;
    if (!m->together) return 1;
    if (m->shift < 0) return new[part + 1] + m->shift > old[part] || (last < m->parts && new[last] + m->shift < old[part + 1]);
    return new[part] + m->shift < old[part + 1] || (first && new[first] + m->shift > old[part]);
}

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Notes where each part's copy lies, from `bytes` on, or -1; returns where the next may. */
static int64_t place_copies(const moving *m, int64_t *places, int64_t bytes)
{
    for (int64_t segment = 0; segment < m->segments; segment++) {
        const int64_t first = segment_start(m, segment), last = segment_start(m, segment + 1);
        for (int64_t part = first; part < last; part++) {
            places[part] = -1;
            if (!is_in_danger(m, part, first, last)) continue;
            const int64_t leaving = m->r->old_offsets[part + 1] - m->r->old_offsets[part];
            places[part] = bytes;
            for (int k = 0; k < m->r->count; k++) bytes += aligned(leaving * m->r->streams[k].bytes);
        }
    }
    return bytes;
}

typedef struct {
    const moving *each;
    int64_t count, *first_parts, *first_segments, *places; /* places: of all parts' copies */
    char *copies;
} movings;

/* Where a part is read, in its copy if it has one, and written; `makes` that copy. */
static passage way_of(const movings *all, int64_t which, int64_t part, int makes)
{
    const repacking *r = all->each[which].r;
    const int64_t place = all->places[all->first_parts[which] + part];
    passage at = passage_of(r, part);
    char *copy = place < 0 ? NULL : all->copies + place;
    for (int k = 0; copy && k < r->count; k++) {
        const int64_t bytes = at.leaving * r->streams[k].bytes;
        if (makes) memcpy(copy, at.from[k], (size_t)bytes);
        at.from[k] = copy;
        copy += aligned(bytes);
    }
    return at;
}

static void copy_part(const void *context, int64_t part)
{
    const movings *all = (const movings *)context;
    const int64_t which = owner_of(all->first_parts, all->count, part);
    way_of(all, which, part - all->first_parts[which], 1);
}

static void move_segment(const void *context, int64_t segment)
{
    const movings *all = (const movings *)context;
    const int64_t which = owner_of(all->first_segments, all->count, segment), own = segment - all->first_segments[which];
    const moving *m = all->each + which;
    const int64_t first = segment_start(m, own), last = segment_start(m, own + 1);
    for (int64_t turn = first; turn < last; turn++) {
        const int64_t part = m->shift < 0 ? turn : first + last - 1 - turn;
        repack_from(m->r, part, way_of(all, which, part, 0));
    }
}

static void run_movings(movings *all, int threads)
{
    const int64_t parts = all->first_parts[all->count], worth = parts / PARTS_PER_THREAD;
    if (all->copies) share_out(copy_part, all, parts, worth, threads);
    share_out(move_segment, all, all->first_segments[all->count], worth, threads);
}

/* Moves values from the entries held before to those held now; newcomers get a whole number. NULL bits: all are held.
 * Results may overlap with `old` where neither is NULL bits. Returns 0 where it could not, with nothing written. */
int gradpolicy_repack(const repacking *each, int64_t count, int threads)
{
    moving *moves = malloc((size_t)count * sizeof *moves);
    int64_t *firsts = calloc((size_t)(2 * count + 2), sizeof *firsts), bytes = 0;
    movings all = {.each = moves, .count = count, .first_parts = firsts};
    int possible = moves && firsts;
    if (possible) all.first_segments = firsts + count + 1;
    int64_t parts = 0;
    for (int64_t i = 0; i < count; i++) parts += parts_of(each[i].size);
    for (int64_t i = 0; possible && i < count; i++) {
        possible = each[i].count >= 1 && each[i].count <= STREAMS;
        if (!possible) break;
        moves[i] = moving_of(each + i, share_of(parts, threads));
        all.first_parts[i + 1] = all.first_parts[i] + moves[i].parts;
        all.first_segments[i + 1] = all.first_segments[i] + moves[i].segments;
    }
    possible = possible && (all.places = malloc((size_t)(all.first_parts[count] + 1) * sizeof *all.places));
    for (int64_t i = 0; possible && i < count; i++) bytes = place_copies(moves + i, all.places + all.first_parts[i], bytes);
    possible = possible && (!bytes || (all.copies = malloc((size_t)bytes)));
    if (possible) run_movings(&all, threads);
    free(all.copies);
    free(all.places);
    free(firsts);
    free(moves);
    return possible;
}
