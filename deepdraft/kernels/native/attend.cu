// Sparse attention of a decode step, sm_90: one chunk of 64 keys of one row, for BH heads.
//
// All of a chunk's records are asked for at once, unpacked once into bf16 in shared memory, and used
// twice, for scores and for sums: what a block waits for is one trip to memory. Probabilities are
// rounded to bf16 relative to the chunk's top (kernels.attention, whose combine kernel follows).
// Main records hold two channels in a byte: even channels lie before odd ones in shared memory and
// in the parts that are written, as in the Triton kernel.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   C 512 channels   PAIRS that turn, the last ones   BH heads of a block: 16, 32 or 64
//   SHARED_BYTES of dynamic shared memory
//
// Letters: R rows, H heads, W window places, K selected places.

#include "machine.cuh"

constexpr int KEYS = 64, THREADS = 256, WARPS = 8;
constexpr int ROW = C + 8;                  // bf16 values of a row in shared memory: no bank twice
constexpr int P_ROW = KEYS + 8, S_ROW = KEYS + 2;
constexpr int TILES = BH / 16;              // mma tiles of heads
constexpr int KEY_TILES = TILES;            // mma tiles of keys in one warp's scores
constexpr int CHAINS = 4 / KEY_TILES;       // independent sums of a score
static_assert(C == 512, "records of other sizes are not made of 16-byte pieces");

struct Params {
    const u16* q;             // bf16 [R, q_stride], before rotation
    const float* cosines;     // [R, PAIRS]
    const float* sines;
    const u8* window;         // records of C + C / 32 bytes
    const u8* main;           // records of C / 2 + C / 16 bytes
    const int* window_rows;   // [R, W], -1 in empty places
    const int* main_rows;     // [R, K]
    float* part;              // [R, chunks, H, C]
    float* top;               // [R, chunks, H]
    float* total;
    int heads, q_stride, window_places, main_places, window_chunks, chunks;
    float scale;
};

// ---- formats -------------------------------------------------------------------------------

// Eight E2M1 codes -> bf16 pairs of the even ones (e[0], e[1]) and of the odd ones (o[0], o[1]).
__device__ __forceinline__ void unpack_e2m1(u32 w, u32 (&e)[2], u32 (&o)[2]) {
    // A code's magnitude selects both bytes of its bf16 from tables; signs are put in after.
    u32 m = w & 0x77777777u, n = m >> 16;
    u32 h0 = __byte_perm(0x3F3F3F00u, 0x40404040u, m), l0 = __byte_perm(0xC0800000u, 0xC0804000u, m);
    u32 h1 = __byte_perm(0x3F3F3F00u, 0x40404040u, n), l1 = __byte_perm(0xC0800000u, 0xC0804000u, n);
    u32 a = __byte_perm(h0, h1, 0x6420), b = __byte_perm(l0, l1, 0x6420);
    a |= (w << 4) & 0x80808080u;
    e[0] = __byte_perm(b, a, 0x5140), e[1] = __byte_perm(b, a, 0x7362);
    a = __byte_perm(h0, h1, 0x7531), b = __byte_perm(l0, l1, 0x7531);
    a |= w & 0x80808080u;
    o[0] = __byte_perm(b, a, 0x5140), o[1] = __byte_perm(b, a, 0x7362);
}

// ---- parts of a chunk ----------------------------------------------------------------------

__device__ __forceinline__ void unpack_main(u16* keys, const u8* cache, const int* address) {
    constexpr int PIECES = C / 32, RECORD = C / 2 + C / 16, EACH = KEYS * PIECES / THREADS;
    uint4 codes[EACH];
    u16 scales[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int piece = threadIdx.x + i * THREADS, at = address[piece / PIECES], p = piece % PIECES;
        codes[i] = make_uint4(0, 0, 0, 0), scales[i] = 0;
        if (at >= 0) {
            const u8* record = cache + (long long)at * RECORD;
            codes[i] = *(const uint4*)(record + 16 * p);
            scales[i] = *(const u16*)(record + C / 2 + 2 * p);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int piece = threadIdx.x + i * THREADS, p = piece % PIECES;
        u16* row = keys + piece / PIECES * ROW + 16 * p;
        u32 words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        u32 both = bf16s_of_e4m3(scales[i]);
        u32 scale[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 e[2][2], o[2][2];
            unpack_e2m1(words[2 * half], e[0], o[0]);
            unpack_e2m1(words[2 * half + 1], e[1], o[1]);
            u32 s = scale[half];
            *(uint4*)(row + 8 * half) = make_uint4(
                times_bf16(e[0][0], s), times_bf16(e[0][1], s), times_bf16(e[1][0], s),
                times_bf16(e[1][1], s));
            *(uint4*)(row + C / 2 + 8 * half) = make_uint4(
                times_bf16(o[0][0], s), times_bf16(o[0][1], s), times_bf16(o[1][0], s),
                times_bf16(o[1][1], s));
        }
    }
}

__device__ __forceinline__ void unpack_window(u16* keys, const u8* cache, const int* address) {
    constexpr int PIECES = C / 16, RECORD = C + C / 32, EACH = KEYS * PIECES / THREADS;
    uint4 codes[EACH];
    u8 scales[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int piece = threadIdx.x + i * THREADS, at = address[piece / PIECES], p = piece % PIECES;
        codes[i] = make_uint4(0, 0, 0, 0), scales[i] = 0;
        if (at >= 0) {
            const u8* record = cache + (long long)at * RECORD;
            codes[i] = *(const uint4*)(record + 16 * p);
            scales[i] = record[C + p / 2];
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int piece = threadIdx.x + i * THREADS, p = piece % PIECES;
        u16* row = keys + piece / PIECES * ROW + 16 * p;
        u32 words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        u32 s = (u32)scales[i] * 0x00800080u, out[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            out[2 * k] = times_bf16(bf16s_of_e4m3((u16)(words[k] & 0xFFFF)), s);
            out[2 * k + 1] = times_bf16(bf16s_of_e4m3((u16)(words[k] >> 16)), s);
        }
        *(uint4*)row = make_uint4(out[0], out[1], out[2], out[3]);
        *(uint4*)(row + 8) = make_uint4(out[4], out[5], out[6], out[7]);
    }
}

// Queries of BH heads, turned; for main records even channels before odd ones.
__device__ __forceinline__ void load_queries(u16* out, const Params& p, int row, int head, bool apart) {
    constexpr int PIECES = C / 8, EACH = BH * PIECES / THREADS, STILL = C - 2 * PAIRS;
    const u16* q = p.q + (long long)row * p.q_stride + head * C;
    uint4 codes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int piece = threadIdx.x + i * THREADS;
        codes[i] = make_uint4(0, 0, 0, 0);
        if (head + piece / PIECES < p.heads) codes[i] = *(const uint4*)(q + 8 * piece);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int piece = threadIdx.x + i * THREADS, channel = piece % PIECES * 8;
        u16* to = out + piece / PIECES * ROW;
        u32 words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        if (channel >= STILL) {
            int pair = row * PAIRS + (channel - STILL) / 2;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float even = bf16_value(words[k] & 0xFFFF), odd = bf16_value(words[k] >> 16);
                float c = p.cosines[pair + k], s = p.sines[pair + k];
                words[k] = pack_bf16(even * c - odd * s, odd * c + even * s);
            }
        }
        if (!apart) {
            *(uint4*)(to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
            *(uint2*)(to + channel / 2) = make_uint2(
                __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410));
            *(uint2*)(to + C / 2 + channel / 2) = make_uint2(
                __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
        }
    }
}

// scores [BH, S_ROW]: queries times keys.
__device__ __forceinline__ void score(float* scores, u32 queries, u32 keys) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int ACROSS = WARPS / TILES;
    int head = warp / ACROSS * 16, first = warp % ACROSS * (8 * KEY_TILES);
    float sum[KEY_TILES][CHAINS][4] = {};
    u32 q_at = queries + 2 * ((head + lane % 16) * ROW + lane / 16 * 8);
    u32 k_at = keys + 2 * ((first + lane % 8) * ROW + lane / 8 * 8);
#pragma unroll 4
    for (int k = 0; k < C / 32; k++) {
        u32 a[2][4];
        load_matrices(a[0], q_at + 64 * k);
        load_matrices(a[1], q_at + 64 * k + 32);
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            u32 b[4];
            load_matrices(b, k_at + 2 * 8 * ROW * n + 64 * k);
            multiply(sum[n][2 * k % CHAINS], a[0], b[0], b[1], true);
            multiply(sum[n][(2 * k + 1) % CHAINS], a[1], b[2], b[3], true);
        }
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float all = sum[n][0][i];
#pragma unroll
            for (int c = 1; c < CHAINS; c++) all += sum[n][c][i];
            int h = head + lane / 4 + i / 2 * 8, key = first + 8 * n + lane % 4 * 2 + i % 2;
            scores[h * S_ROW + key] = all;
        }
}

// Probabilities relative to the chunk's top, bf16 [BH, P_ROW]; the top and their sum are stored.
__device__ __forceinline__ void weigh(
    u16* weights, const float* scores, const int* address, const Params& p, long long place, int head
) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BH / WARPS; i++) {
        int h = warp * (BH / WARPS) + i;
        float v[2], top = -1e30f, total = 0.f;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            v[k] = scores[h * S_ROW + 2 * lane + k] * p.scale;
            if (address[2 * lane + k] < 0) v[k] = -__uint_as_float(0x7F800000u);
            top = fmaxf(top, v[k]);
        }
#pragma unroll
        for (int by = 16; by > 0; by /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
#pragma unroll
        for (int k = 0; k < 2; k++) total += v[k] = __expf(v[k] - top);
#pragma unroll
        for (int by = 16; by > 0; by /= 2) total += __shfl_xor_sync(~0u, total, by);
        *(u32*)(weights + h * P_ROW + 2 * lane) = pack_bf16(v[0], v[1]);
        if (lane == 0 && head + h < p.heads) {
            p.top[place * p.heads + head + h] = top;
            p.total[place * p.heads + head + h] = total;
        }
    }
}

// part [BH, C]: probabilities times keys.
__device__ __forceinline__ void add_up(float* part, u32 weights, u32 keys, int heads) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int WIDE = C / WARPS;
    u32 v_at = keys + 2 * (lane % 16 * ROW + warp * WIDE + lane / 16 * 8);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        float sum[WIDE / 8][4] = {};
        u32 p_at = weights + 2 * ((16 * m + lane % 16) * P_ROW + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            u32 a[4];
            load_matrices(a, p_at + 32 * k);
#pragma unroll
            for (int n = 0; n < WIDE / 16; n++) {
                u32 b[4];
                load_turned_matrices(b, v_at + 2 * (16 * ROW * k + 16 * n));
                multiply(sum[2 * n], a, b[0], b[1], true);
                multiply(sum[2 * n + 1], a, b[2], b[3], true);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int h = 16 * m + lane / 4 + 8 * half;
            if (h < heads)
#pragma unroll
                for (int n = 0; n < WIDE / 8; n++) {
                    float2 two = {sum[n][2 * half], sum[n][2 * half + 1]};
                    *(float2*)(part + (long long)h * C + warp * WIDE + 8 * n + lane % 4 * 2) = two;
                }
        }
    }
}

// ---- kernel --------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, BH == 16 ? 2 : 1)
attend_kernel(const __grid_constant__ Params p) {
    u16* keys = (u16*)raw;
    u16* queries = keys + KEYS * ROW;
    u16* weights = queries + BH * ROW;
    float* scores = (float*)(weights + BH * P_ROW);
    int* address = (int*)(scores + BH * S_ROW);
    int chunk = blockIdx.x % p.chunks, head = blockIdx.x / p.chunks * BH, row = blockIdx.y;
    bool window = chunk < p.window_chunks;
    launch_dependents();   // what follows may start to wait
    dependency_wait();
    if (threadIdx.x < KEYS) {
        int place = (window ? chunk : chunk - p.window_chunks) * KEYS + threadIdx.x;
        int places = window ? p.window_places : p.main_places;
        const int* list = window ? p.window_rows : p.main_rows;
        address[threadIdx.x] = place < places ? list[(long long)row * places + place] : -1;
    }
    __syncthreads();
    int lane = threadIdx.x % 32;
    long long place = (long long)row * p.chunks + chunk;
    if (__ballot_sync(~0u, address[lane] >= 0 || address[lane + 32] >= 0) == 0) {  // nobody here
        if (threadIdx.x < BH && head + threadIdx.x < p.heads) {
            p.top[place * p.heads + head + threadIdx.x] = -1e30f;
            p.total[place * p.heads + head + threadIdx.x] = 0.f;
        }
        return;
    }
    if (window)
        unpack_window(keys, p.window, address);
    else
        unpack_main(keys, p.main, address);
    load_queries(queries, p, row, head, !window);
    __syncthreads();
    score(scores, shared_address(queries), shared_address(keys));
    __syncthreads();
    weigh(weights, scores, address, p, place, head);
    __syncthreads();
    float* part = p.part + (place * p.heads + head) * C;
    add_up(part, shared_address(weights), shared_address(keys), p.heads - head);
}
