// Index keys as operands of warp groups, and the sum over heads: what scoring kernels share.
//
// A record has 64 bytes of E2M1 codes (even channel low, odd channel high) and 4 E8M0 scales. Thread t
// of four takes word t of each group of 32 channels; its code i is channel 8 t + i of the group. Steps of
// 16 channels so have an order of their own, and queries are put into shared memory in the same one.
//
// Letters: H index heads, C index channels, K keys.

constexpr int HEADS = 32, CHANNELS = 128, RECORD = 68, PANEL = 8192, ROWS = 8;

struct KeyWords { u32 codes[2][4], scales[2]; };   // of keys g and g + 8 of a warp's 16

__device__ __forceinline__ u32 ask_word(const u32* from) {
#ifdef EMULATED
    return *from;
#else
    u32 v;
    asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
#endif
}

// Ask for keys first + g and first + g + 8; from `end` on for the last one.
__device__ __forceinline__ void ask_keys(KeyWords& k, const u8* keys, int first, int end) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int entry = min(first + lane / 4 + 8 * i, end - 1);
        const u32* from = (const u32*)(keys + (long long)entry * RECORD);
#pragma unroll
        for (int j = 0; j < 4; j++) k.codes[i][j] = ask_word(from + 4 * j + lane % 4);
        k.scales[i] = ask_word(from + 16);
    }
}

// 2**-32 times their values: steps of 16 channels as rows of A. A magnitude's bits stand where a bf16 number
// has the end of its exponent and the begin of its mantissa: 2**-126 times the value, subnormals too. One
// more power of two brings it to its scale; above 2**33, which no normed key has, it is infinite.
__device__ __forceinline__ void key_values(u32 (&a)[8][4], const KeyWords& k) {
    constexpr u32 SIZE = 0x01C001C0, SIGN = 0x80008000;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 x = k.codes[i][j], e = min((int)(k.scales[i] >> 8 * j & 255) + 94, 255), scale = e * 0x800080;
            a[2 * j][i] = ((x << 6) & SIZE) | ((x << 12) & SIGN);           // codes 0 and 4
            a[2 * j][2 + i] = ((x << 2) & SIZE) | ((x << 8) & SIGN);        // 1 and 5
            a[2 * j + 1][i] = ((x >> 2) & SIZE) | ((x << 4) & SIGN);        // 2 and 6
            a[2 * j + 1][2 + i] = ((x >> 6) & SIZE) | (x & SIGN);           // 3 and 7
#pragma unroll
            for (int v = 0; v < 4; v++) {
                u32& pair = a[2 * j + v / 2][2 * (v % 2) + i];
                pair = times_bf16(pair, scale);
            }
        }
}

// Channels 32 j.. of one head of one row into column n (of 64) of the `pair`-th pair of rows: `queries`, a
// multiple of 1,024, has the panels of all ROWS / 2 pairs for the first 64 channels, then for the others.
// from: null for zeros.
__device__ __forceinline__ void put_query(u8* queries, int pair, int n, int j, const u16* from) {
    u32 q[16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = from ? ((const uint4*)from)[i] : make_uint4(0, 0, 0, 0);
        q[4 * i] = v.x, q[4 * i + 1] = v.y, q[4 * i + 2] = v.z, q[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int w = 0; w < 4; w++) {   // every fourth channel from w on
        u32 d[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            d[i] = __byte_perm(q[4 * i + w / 2], q[4 * i + 2 + w / 2], w % 2 ? 0x7632 : 0x5410);
        *(uint4*)(queries + (ROWS / 2 * (j / 2) + pair) * PANEL + n * 128 + ((4 * (j % 2) + w ^ n % 8) << 4)) =
            make_uint4(d[0], d[1], d[2], d[3]);
    }
}

// Half a head's weight (rounded, scaled, rounded again), for keys of 2**-32 times their values.
__device__ __forceinline__ float head_weight(const void* weights, long long at, bool bf16, float scale) {
    float w = bf16 ? bf16_value(((const u16*)weights)[at]) : ((const float*)weights)[at];
    w = bf16_value(pack_bf16(w, 0.f) & 0xFFFF) * scale;
    return bf16_value(pack_bf16(w, 0.f) & 0xFFFF) * 2147483648.f;
}

// Dots of 64 keys of a warp group with PAIRS pairs of rows whose queries begin at `queries`.
template <int PAIRS>
__device__ __forceinline__ void all_dots(float (&c)[PAIRS][32], const u32 (&a)[8][4], u32 queries) {
    products_begin();
#pragma unroll
    for (int s = 0; s < 8; s++)
        multiply_group(c, a[s], matrix_of(queries + ROWS / 2 * (s / 4) * PANEL + s % 4 * 32), s > 0);
    products_commit();
}

// Those of the keys at hand; the keys at `next` are asked for meanwhile.
template <int PAIRS>
__device__ __forceinline__ void dots_of(float (&c)[PAIRS][32], KeyWords& words, const u8* keys, int next, int end, u32 queries) {
    u32 a[8][4];
    key_values(a, words);
    ask_keys(words, keys, next, end);
    all_dots<PAIRS>(c, a, queries);
    products_wait();
#pragma unroll
    for (int i = 0; i < PAIRS; i++) hold(c[i]);
}

// Of one pair of rows: sums over heads of weight times the positive part of a dot. Thread t of four gets
// the score of key g + 8 (t % 2) for row t / 2. weights: [2, H] of the pair.
__device__ __forceinline__ float pair_score(const float (&c)[32], const float* weights) {
    const int t = threadIdx.x % 4;
    float sum[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float own[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 w = *(const float2*)(weights + row * HEADS + 8 * i + 2 * t);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float* d = c + 4 * (4 * row + i) + 2 * k;
                // Twice the positive part, by another pipe than a maximum's.
                own[k] = fmaf(d[0] + fabsf(d[0]), w.x, own[k]);
                own[k] = fmaf(d[1] + fabsf(d[1]), w.y, own[k]);
            }
        }
        const float other = __shfl_xor_sync(~0u, t % 2 ? own[0] : own[1], 1);
        sum[row] = (t % 2 ? own[1] : own[0]) + other;
    }
    const float other = __shfl_xor_sync(~0u, t / 2 ? sum[0] : sum[1], 2);
    return (t / 2 ? sum[1] : sum[0]) + other;
}
