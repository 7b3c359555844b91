// One group of 32 columns of a few-row product: formats, rows in registers, multiplication. Part of
// stream.cu, whose macros and parameters it uses.

// ---- formats -------------------------------------------------------------------------------

__device__ __forceinline__ u16 low16(u32 v) { return (u16)(v & 0xFFFF); }
__device__ __forceinline__ u16 high16(u32 v) { return (u16)(v >> 16); }
__device__ __forceinline__ float round_bf16(float v) { return bf16_value(pack_bf16(v, 0.f) & 0xFFFF); }
// Eight E2M1 codes -> halves of 2**-14 times them: the four A registers of one mma. A byte holds
// one code in bits 7 3 2 1 (sign first) and another one in bits 0 6 5 4.
__device__ __forceinline__ void unpack_e2m1(u32 w, u32 (&a)[4]) {
    // Shifts to the left go to the multipliers, so what counts is everything else.
    const u32 v = either(w >> 3, w << 7, 0x7F7F7F7Fu);
    a[0] = w & 0x8E008E00u;
    a[1] = (w << 8) & 0x8E008E00u;
    a[2] = v & 0x8E008E00u;
    a[3] = (v << 8) & 0x8E008E00u;
}
// The arithmetic of kernels/rounding.py: bits of the power of two of a group's largest magnitude.
__device__ __forceinline__ u32 scale_bits(float most) {
    return (max(__float_as_uint(most), 0x38D1B717u) + (0x1FFFFFu - (8u << 23))) & 0x7F800000u;
}
__device__ __forceinline__ float inverse_of(u32 bits) { return __uint_as_float((254u << 23) - bits); }
// E8M0 byte `I` of a word as a float; byte 0 is zero.
template <int I> __device__ __forceinline__ float scale_of(u32 w) {
    return __uint_as_float((I == 3 ? w >> 1 : w << (I == 3 ? 0 : 23 - 8 * I)) & 0x7F800000u);
}

// ---- rows ----------------------------------------------------------------------------------

struct Rows {
    u32 x[NG][X_WORDS];
    float s[BF16_ROWS || FOLD ? 1 : NG][2];
};

#if FOLD
// Codes of row g and their scales -> halves relative to the largest scale. What is more than 2**15
// below it loses bits that no float32 sum beside a row's large values would keep.
__device__ __forceinline__ void fold(Rows& r, const u32 (&codes)[NG][2], const float (&scale)[NG], int t) {
    float most = scale[0];
#pragma unroll
    for (int i = 1; i < NG; i++) most = fmaxf(most, scale[i]);
    const float inverse = inverse_of(__float_as_uint(most));
#pragma unroll
    for (int i = 0; i < NG; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u16 two = j & 1 ? high16(codes[i][j / 2]) : low16(codes[i][j / 2]);
            r.x[i][j] = scaled_halves(halves_of_e4m3(two), scale[i] * inverse);
        }
    r.s[0][0] = __shfl_sync(~0u, most, 8 * t) * 16384.f;
    r.s[0][1] = __shfl_sync(~0u, most, 8 * t + 4) * 16384.f;
}
#endif

// Row values as they lie in memory. Thread (g, t) of a warp reads columns 8 t .. 8 t + 7 of each
// group of row g. Its groups are `first`, `first` + WK, ..: what the warps of a block read at a time
// lies together.
struct RawRows {
    uint4 v[NG];   // 8 bf16 values; FP8: the first two words
    float2 s[NG];  // FP8: scales of rows 2 t and 2 t + 1; folded: of row g
};

__device__ __forceinline__ void fetch_rows(RawRows& r, const Params& p, int row_tile, int slot, int first, int g, int t) {
    u64 row = row_tile * 8 + g;
    if (DOWN) row = row * p.picks + max(slot, 0);  // activations of a pick; a row without one counts as zeros
    const u64 at = row * p.x_width + first * 32 + 8 * t;
#pragma unroll
    for (int i = 0; i < NG; i++) {
        r.v[i] = make_uint4(0, 0, 0, 0);
        if (BF16_ROWS || DOWN) {
            if (slot >= 0) r.v[i] = *(const uint4*)((const u16*)p.x + at + i * 32 * WK);
        } else {
            const uint2 two = *(const uint2*)((const u8*)p.x + at + i * 32 * WK);
            const float* scales = p.xs + (u64)(first + i * WK) * p.rows + row_tile * 8;
            r.v[i].x = two.x, r.v[i].y = two.y;
            if (FOLD) r.s[i].x = scales[g];
            else r.s[i] = *(const float2*)(scales + 2 * t);
        }
    }
}

// bf16 values -> halves relative to the largest of the row in this warp, which lies at 2**14: exact
// down to 2**-31 of it, and what loses bits below that no float32 sum beside it would keep.
__device__ __forceinline__ void take_halves(Rows& r, const RawRows& given, int t) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < NG; i++) {
        const u32 words[4] = {given.v[i].x, given.v[i].y, given.v[i].z, given.v[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            most = fmaxf(most, fmaxf(fabsf(bf16_value(words[j] & 0xFFFF)), fabsf(__uint_as_float(words[j] & 0xFFFF0000u))));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const u32 bits = max(__float_as_uint(most) & 0x7F800000u, 15u << 23);
    const float inverse = __uint_as_float((268u << 23) - bits), scale = __uint_as_float(bits - (14u << 23));
#pragma unroll
    for (int i = 0; i < NG; i++) {
        const u32 words[4] = {given.v[i].x, given.v[i].y, given.v[i].z, given.v[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            r.x[i][j % X_WORDS] = pack_halves(bf16_value(words[j] & 0xFFFF) * inverse, __uint_as_float(words[j] & 0xFFFF0000u) * inverse);
    }
    r.s[0][0] = __shfl_sync(~0u, scale, 8 * t);
    r.s[0][1] = __shfl_sync(~0u, scale, 8 * t + 4);
}

__device__ __forceinline__ void take_rows(Rows& r, const RawRows& given, int t) {
    u32 codes[NG][2];
    float own_scale[NG];
    if (BF16_ROWS) {
        take_halves(r, given, t);
        return;
    }
#pragma unroll
    for (int i = 0; i < NG; i++) {
        const u32 words[4] = {given.v[i].x, given.v[i].y, given.v[i].z, given.v[i].w};
        codes[i][0] = words[0], codes[i][1] = words[1], own_scale[i] = given.s[i].x;
        if (DOWN) {  // quantised here in groups of 32: the arithmetic of gemv.quantize_groups
            float f[8], most = 0.f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                f[2 * j] = bf16_value(words[j] & 0xFFFF), f[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000u);
                most = fmaxf(most, fmaxf(fabsf(f[2 * j]), fabsf(f[2 * j + 1])));
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const u32 bits = scale_bits(most);
            const float inverse = inverse_of(bits);
#pragma unroll
            for (int j = 0; j < 2; j++)
                codes[i][j] = e4m3_codes(f[4 * j] * inverse, f[4 * j + 1] * inverse, f[4 * j + 2] * inverse, f[4 * j + 3] * inverse);
            own_scale[i] = __uint_as_float(bits);
        }
#if !FOLD
        r.x[i][0] = codes[i][0], r.x[i][1] = codes[i][1];
        const int si = BF16_ROWS ? 0 : i;
        r.s[si][0] = DOWN ? __shfl_sync(~0u, own_scale[i], 8 * t) : given.s[i].x;
        r.s[si][1] = DOWN ? __shfl_sync(~0u, own_scale[i], 8 * t + 4) : given.s[i].y;
        if (FP4) r.s[si][0] *= 16384.f, r.s[si][1] *= 16384.f;
#endif
    }
#if FOLD
    fold(r, codes, own_scale, t);
#endif
}

// ---- one group -----------------------------------------------------------------------------

__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&c)[4], float top, float bottom, float s0, float s1) {
    acc[0] += c[0] * (FOLD ? top : top * s0);
    acc[1] += c[1] * (FOLD ? top : top * s1);
    acc[2] += c[2] * (FOLD ? bottom : bottom * s0);
    acc[3] += c[3] * (FOLD ? bottom : bottom * s1);
}

__device__ __forceinline__ void multiply_fp4(float (&acc)[2][4], uint4 q, u32 scales, const u32 (&x)[X_WORDS], float s0, float s1) {
    const u32 b0 = FOLD ? x[0] : halves_of_e4m3(low16(x[0]));
    const u32 b1 = FOLD ? x[1] : halves_of_e4m3(high16(x[0]));
    const u32 b2 = FOLD ? x[2 % X_WORDS] : halves_of_e4m3(low16(x[1]));
    const u32 b3 = FOLD ? x[3 % X_WORDS] : halves_of_e4m3(high16(x[1]));
    u32 a[4];
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
    unpack_e2m1(q.x, a);
    multiply(c, a, b0, b1, false);
    unpack_e2m1(q.z, a);
    multiply(d, a, b0, b1, false);
    unpack_e2m1(q.y, a);
    multiply(c, a, b2, b3, false);
    unpack_e2m1(q.w, a);
    multiply(d, a, b2, b3, false);
    add_scaled(acc[0], c, scale_of<0>(scales), scale_of<1>(scales), s0, s1);
    add_scaled(acc[1], d, scale_of<2>(scales), scale_of<3>(scales), s0, s1);
}

// q: words (half, k step) of one block of 16 rows; a thread's bytes are 8 columns of two rows.
__device__ __forceinline__ void multiply_fp8(float (&acc)[4], uint4 q, float scale, const u32 (&x)[X_WORDS], float s0, float s1) {
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    u32 words[2][2] = {{q.x, q.z}, {q.y, q.w}};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        u32 a[4], b0, b1;
        a[0] = halves_of_e4m3(low16(words[k][0])), a[1] = halves_of_e4m3(low16(words[k][1]));
        a[2] = halves_of_e4m3(high16(words[k][0])), a[3] = halves_of_e4m3(high16(words[k][1]));
        if (BF16_ROWS) b0 = x[2 * k % X_WORDS], b1 = x[(2 * k + 1) % X_WORDS];
        else b0 = halves_of_e4m3(low16(x[k])), b1 = halves_of_e4m3(high16(x[k]));
        multiply(c, a, b0, b1, false);
    }
    float f0 = scale * s0, f1 = scale * s1;
    acc[0] += c[0] * f0;
    acc[1] += c[1] * f1;
    acc[2] += c[2] * f0;
    acc[3] += c[3] * f1;
}
