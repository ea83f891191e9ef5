/* Adam for eight entries at once: float32 with a byte a code, where the processor has AVX2. kernel.c includes this.
 * The operations and their order are those of kernel_adam.c, so that an entry's place decides nothing. */

#define ALWAYS static inline __attribute__((always_inline))

typedef struct { __m256 one_beta1, beta2, one_beta2, eps, shrink, decay, factor, sizes[2], inverses[2]; } lanes;

typedef struct { float *parameter, *first, *second, *largest; const float *gradient; } streams;

enum { SHARED, EIGHT, SIXTEEN, MANY }; /* how many slots corrections are looked up among */

static lanes lanes_of(const job *j)
{
    const float *table = (const float *)j->corrections;
    float sizes[16], inverses[16];
    for (int i = 0; i < 16; i++) {
        sizes[i] = table[j->slots == 1 ? 0 : 2 * i];
        inverses[i] = table[j->slots == 1 ? 1 : 2 * i + 1];
    }
    return (lanes){
        _mm256_set1_ps((float)(1.0 - j->beta1)), _mm256_set1_ps((float)j->beta2), _mm256_set1_ps((float)(1.0 - j->beta2)),
        _mm256_set1_ps((float)j->eps), _mm256_set1_ps((float)(j->decoupled ? 1.0 - j->lr * j->weight_decay : 1.0)),
        _mm256_set1_ps((float)(j->decoupled ? 0.0 : j->weight_decay)),
        _mm256_set1_ps((float)((j->maximize ? -1.0 : 1.0) / j->scale)),
        {_mm256_loadu_ps(sizes), _mm256_loadu_ps(sizes + 8)}, {_mm256_loadu_ps(inverses), _mm256_loadu_ps(inverses + 8)}};
}

static streams streams_of(const job *j, int64_t at, int64_t own_at)
{
    return (streams){(float *)j->parameter + at, (float *)j->first + own_at, (float *)j->second + own_at,
                     j->largest ? (float *)j->largest + own_at : NULL, (const float *)j->gradient + at};
}

/* Two pairs side by side. */
ALWAYS __m128 two_pairs(const float *table, uint64_t codes)
{
    const __m128 low = _mm_loadl_pi(_mm_setzero_ps(), (const __m64 *)(table + 2 * (codes & 0xff)));
    return _mm_loadh_pi(low, (const __m64 *)(table + 2 * (codes >> 8 & 0xff)));
}

/* Corrections of eight byte codes; `wide` holds them a lane each. */
ALWAYS void look_up_eight(const job *j, const lanes *l, uint64_t codes, __m256i wide, int kind, __m256 *size, __m256 *inverse)
{
    if (kind == MANY) { /* more slots than registers hold: a load a pair */
        const float *table = (const float *)j->corrections;
        codes &= 0x7f7f7f7f7f7f7f7full;
        const __m256 outer = _mm256_set_m128(two_pairs(table, codes >> 32), two_pairs(table, codes));
        const __m256 inner = _mm256_set_m128(two_pairs(table, codes >> 48), two_pairs(table, codes >> 16));
        *size = _mm256_shuffle_ps(outer, inner, 0x88);
        *inverse = _mm256_shuffle_ps(outer, inner, 0xdd);
        return;
    }
    *size = l->sizes[0];
    *inverse = l->inverses[0];
    if (kind == SHARED) return;
    *size = _mm256_permutevar8x32_ps(*size, wide);
    *inverse = _mm256_permutevar8x32_ps(*inverse, wide);
    if (kind == EIGHT) return;
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 28));
    *size = _mm256_blendv_ps(*size, _mm256_permutevar8x32_ps(l->sizes[1], wide), upper);
    *inverse = _mm256_blendv_ps(*inverse, _mm256_permutevar8x32_ps(l->inverses[1], wide), upper);
}

ALWAYS void put(float *place, __m256 old, __m256 fresh, __m256 active, int masked)
{
    _mm256_storeu_ps(place, masked ? _mm256_blendv_ps(old, fresh, active) : fresh);
}

/* One update of eight entries; with `masked` only of those whose sign bit is set in `active`. */
ALWAYS void update_eight(const lanes *l, streams s, int64_t at, int masked, __m256 active, int amsgrad, __m256 size, __m256 inverse)
{
    const __m256 p = _mm256_loadu_ps(s.parameter + at), m = _mm256_loadu_ps(s.first + at), v = _mm256_loadu_ps(s.second + at);
    __m256 g = _mm256_mul_ps(_mm256_loadu_ps(s.gradient + at), l->factor);
    if (_mm256_cvtss_f32(l->decay) != 0) g = _mm256_add_ps(g, _mm256_mul_ps(p, l->decay));
    const __m256 new_m = _mm256_add_ps(m, _mm256_mul_ps(_mm256_sub_ps(g, m), l->one_beta1));
    const __m256 new_v = _mm256_add_ps(_mm256_mul_ps(v, l->beta2), _mm256_mul_ps(_mm256_mul_ps(g, g), l->one_beta2));
    __m256 top = new_v;
    if (amsgrad) {
        const __m256 before = _mm256_loadu_ps(s.largest + at);
        /* max gives its second operand where one is NaN: a NaN of new_v stays, as torch has it. */
        top = _mm256_max_ps(before, new_v);
        put(s.largest + at, before, top, active, masked);
    }
    const __m256 divisor = _mm256_add_ps(_mm256_mul_ps(_mm256_sqrt_ps(top), inverse), l->eps);
    const __m256 move = _mm256_div_ps(_mm256_mul_ps(size, new_m), divisor);
    put(s.parameter + at, p, _mm256_sub_ps(_mm256_mul_ps(p, l->shrink), move), active, masked);
    put(s.first + at, m, new_m, active, masked);
    put(s.second + at, v, new_v, active, masked);
}

ALWAYS void eight_by_codes(const job *j, const lanes *l, streams s, int64_t at, uint64_t codes, int masked, int amsgrad, int kind)
{
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)codes));
    __m256 size, inverse;
    look_up_eight(j, l, codes, wide, kind, &size, &inverse);
    update_eight(l, s, at, masked, _mm256_castsi256_ps(wide), amsgrad, size, inverse);
}

ALWAYS int64_t by_codes_as(const job *j, streams s, const uint8_t *codes, int64_t count, int masked, int amsgrad, int kind)
{
    const lanes l = lanes_of(j);
    int64_t at = 0;
    for (; at + 16 <= count; at += 16) {
        uint64_t both[2];
        memcpy(both, codes + at, 16);
        /* A cache line without active entries is not written. */
        if (masked && !((both[0] | both[1]) & 0x8080808080808080ull)) continue;
        eight_by_codes(j, &l, s, at, both[0], masked, amsgrad, kind);
        eight_by_codes(j, &l, s, at + 8, both[1], masked, amsgrad, kind);
    }
    return at;
}

/* Each case of its own, so that no test is left in the loop. */
ALWAYS int64_t by_codes(const job *j, streams s, const uint8_t *codes, int64_t count, int masked)
{
    const int kind = j->slots == 1 ? SHARED : j->slots <= 8 ? EIGHT : j->slots <= 16 ? SIXTEEN : MANY;
    if (s.largest) return by_codes_as(j, s, codes, count, masked, 1, kind);
    if (kind == SHARED) return by_codes_as(j, s, codes, count, masked, 0, SHARED);
    if (kind == EIGHT) return by_codes_as(j, s, codes, count, masked, 0, EIGHT);
    if (kind == SIXTEEN) return by_codes_as(j, s, codes, count, masked, 0, SIXTEEN);
    return by_codes_as(j, s, codes, count, masked, 0, MANY);
}

/* Entries start..stop-1 with a byte code each; returns where it stopped, fewer than 16 before `stop`. */
static int64_t vector_dense(const job *j, int64_t start, int64_t stop)
{
    if (j->code_bytes != 1) return start;
    return start + by_codes(j, streams_of(j, start, start), (const uint8_t *)j->codes + start, stop - start, 1);
}

/* `count` active entries gathered from elsewhere, moments and byte codes from `own_at` on; returns how many it did. */
static int64_t vector_gathered(const job *j, float *parameter, const float *gradient, int64_t own_at, int64_t count)
{
    if (j->code_bytes != 1) return 0;
    streams s = streams_of(j, 0, own_at);
    s.parameter = parameter;
    s.gradient = gradient;
    return by_codes(j, s, (const uint8_t *)j->codes + own_at, count, 0);
}

/* `count` active entries that share a correction; returns how many it did. */
static int64_t vector_run(const job *j, int64_t at, int64_t own_at, float size, float inverse, int64_t count)
{
    const lanes l = lanes_of(j);
    const streams s = streams_of(j, at, own_at);
    const __m256 sizes = _mm256_set1_ps(size), inverses = _mm256_set1_ps(inverse);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) update_eight(&l, s, i, 0, sizes, s.largest != NULL, sizes, inverses);
    return i;
}
