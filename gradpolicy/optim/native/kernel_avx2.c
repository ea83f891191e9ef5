/* Adam for eight entries at once: float32 with a byte a code, where the processor has AVX2. kernel.c includes this.
 * The operations and their order are those of kernel_adam.c, so that an entry's place decides nothing. */

typedef struct { __m256 one_beta1, beta2, one_beta2, eps, shrink, decay, factor, sizes[2], inverses[2]; } lanes;

typedef struct { float *parameter, *first, *second, *largest; const float *gradient; } streams;

enum { SHARED, EIGHT, SIXTEEN, MANY }; /* how many slots corrections are looked up among */

static lanes lanes_of(const job *j)
{
    const settings *by = j->settings;
    const float *table = (const float *)j->corrections;
    float sizes[16], inverses[16];
    for (int i = 0; i < 16; i++) {
        sizes[i] = table[j->slots == 1 ? 0 : 2 * i];
        inverses[i] = table[j->slots == 1 ? 1 : 2 * i + 1];
    }
    return (lanes){
        _mm256_set1_ps((float)(1.0 - by->beta1)), _mm256_set1_ps((float)by->beta2), _mm256_set1_ps((float)(1.0 - by->beta2)),
        _mm256_set1_ps((float)by->eps), _mm256_set1_ps((float)(by->decoupled ? 1.0 - by->lr * by->weight_decay : 1.0)),
        _mm256_set1_ps((float)(by->decoupled ? 0.0 : by->weight_decay)),
        _mm256_set1_ps((float)((by->maximize ? -1.0 : 1.0) / by->scale)),
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

/* Which of eight entries are updated: all; those whose sign bit is set in `active`; or the first few of a
 * vector that does not end here, so that the others are not touched at all. */
enum { WHOLE, SIGNED, BEGUN };

ALWAYS __m256 get(const float *place, __m256 active, int some)
{
    return some == BEGUN ? _mm256_maskload_ps(place, _mm256_castps_si256(active)) : _mm256_loadu_ps(place);
}

ALWAYS void put(float *place, __m256 old, __m256 fresh, __m256 active, int some)
{
    if (some == BEGUN) _mm256_maskstore_ps(place, _mm256_castps_si256(active), fresh);
    else _mm256_storeu_ps(place, some == SIGNED ? _mm256_blendv_ps(old, fresh, active) : fresh);
}

/* One update of eight entries, or of some of them. */
ALWAYS void update_eight(const lanes *l, streams s, int64_t at, int some, __m256 active, int amsgrad, __m256 size, __m256 inverse)
{
    const __m256 p = get(s.parameter + at, active, some), m = get(s.first + at, active, some), v = get(s.second + at, active, some);
    __m256 g = _mm256_mul_ps(get(s.gradient + at, active, some), l->factor);
    if (_mm256_cvtss_f32(l->decay) != 0) g = _mm256_add_ps(g, _mm256_mul_ps(p, l->decay));
    const __m256 new_m = _mm256_add_ps(m, _mm256_mul_ps(_mm256_sub_ps(g, m), l->one_beta1));
    const __m256 new_v = _mm256_add_ps(_mm256_mul_ps(v, l->beta2), _mm256_mul_ps(_mm256_mul_ps(g, g), l->one_beta2));
    __m256 top = new_v;
    if (amsgrad) {
        const __m256 before = get(s.largest + at, active, some);
        /* max gives its second operand where one is NaN: a NaN of new_v stays, as torch has it. */
        top = _mm256_max_ps(before, new_v);
        put(s.largest + at, before, top, active, some);
    }
    const __m256 divisor = _mm256_add_ps(_mm256_mul_ps(_mm256_sqrt_ps(top), inverse), l->eps);
    const __m256 move = _mm256_div_ps(_mm256_mul_ps(size, new_m), divisor);
    put(s.parameter + at, p, _mm256_sub_ps(_mm256_mul_ps(p, l->shrink), move), active, some);
    put(s.first + at, m, new_m, active, some);
    put(s.second + at, v, new_v, active, some);
}

ALWAYS void eight_by_codes(const job *j, const lanes *l, streams s, int64_t at, uint64_t codes, int some, int amsgrad, int kind)
{
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)codes));
    __m256 size, inverse;
    look_up_eight(j, l, codes, wide, kind, &size, &inverse);
    update_eight(l, s, at, some, _mm256_castsi256_ps(wide), amsgrad, size, inverse);
}

ALWAYS int64_t by_codes_as(const job *j, streams s, const uint8_t *codes, int64_t count, int some, int amsgrad, int kind)
{
    const lanes l = lanes_of(j);
    int64_t at = 0;
    for (; at + 16 <= count; at += 16) {
        uint64_t both[2];
        memcpy(both, codes + at, 16);
        /* A cache line without active entries is not written. */
        if (some == SIGNED && !((both[0] | both[1]) & 0x8080808080808080ull)) continue;
        eight_by_codes(j, &l, s, at, both[0], some, amsgrad, kind);
        eight_by_codes(j, &l, s, at + 8, both[1], some, amsgrad, kind);
    }
    return at;
}

/* Each case of its own, so that no test is left in the loop. */
ALWAYS int64_t by_codes(const job *j, streams s, const uint8_t *codes, int64_t count, int some)
{
    const int kind = j->slots == 1 ? SHARED : j->slots <= 8 ? EIGHT : j->slots <= 16 ? SIXTEEN : MANY;
    if (s.largest) return by_codes_as(j, s, codes, count, some, 1, kind);
    if (kind == SHARED) return by_codes_as(j, s, codes, count, some, 0, SHARED);
    if (kind == EIGHT) return by_codes_as(j, s, codes, count, some, 0, EIGHT);
    if (kind == SIXTEEN) return by_codes_as(j, s, codes, count, some, 0, SIXTEEN);
    return by_codes_as(j, s, codes, count, some, 0, MANY);
}

/* Entries start..stop-1 with a byte code each; returns where it stopped, fewer than 16 before `stop`. */
static int64_t vector_dense(const job *j, int64_t start, int64_t stop)
{
    if (j->code_bytes != 1) return start;
    return start + by_codes(j, streams_of(j, start, start), (const uint8_t *)j->codes + start, stop - start, SIGNED);
}

/* `count` active entries gathered from elsewhere, moments and byte codes from `own_at` on; returns how many it did. */
static int64_t vector_gathered(const job *j, float *parameter, const float *gradient, int64_t own_at, int64_t count)
{
    if (j->code_bytes != 1) return 0;
    streams s = streams_of(j, 0, own_at);
    s.parameter = parameter;
    s.gradient = gradient;
    return by_codes(j, s, (const uint8_t *)j->codes + own_at, count, WHOLE);
}

/* `count` active entries that share a correction. */
ALWAYS void run_as(const lanes *l, streams s, int64_t count, int amsgrad, __m256 size, __m256 inverse)
{
    int64_t at = 0;
    for (; at + 8 <= count; at += 8) update_eight(l, s, at, WHOLE, size, amsgrad, size, inverse);
    if (at == count) return;
    const __m256i left = _mm256_set1_epi32((int)(count - at));
    const __m256i begun = _mm256_cmpgt_epi32(left, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    update_eight(l, s, at, BEGUN, _mm256_castsi256_ps(begun), amsgrad, size, inverse);
}

/* Does all of them, and says so. */
static int vector_run(const job *j, const lanes *l, int64_t at, int64_t own_at, float size, float inverse, int64_t count)
{
    const streams s = streams_of(j, at, own_at);
    if (s.largest) run_as(l, s, count, 1, _mm256_set1_ps(size), _mm256_set1_ps(inverse));
    else run_as(l, s, count, 0, _mm256_set1_ps(size), _mm256_set1_ps(inverse));
    return 1;
}
