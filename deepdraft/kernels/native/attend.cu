// Sparse attention of a decode step, sm_90: 16 heads of one row by a cluster of CL blocks.
//
// A block works on two chunks of 64 keys. All of a chunk's records are asked for at once, unpacked
// once into bf16 in shared memory, and used twice, for scores and for sums; the second chunk's are on
// their way meanwhile. Probabilities are rounded to bf16 relative to their chunk's top, as everywhere
// (kernels.attention). The blocks then exchange tops and sums through each other's shared memory, and
// each finishes a part of the output: nothing but it is written to memory.
// Even channels lie before odd ones in shared memory, as main records hold two channels in a byte.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   C 512 channels   PAIRS that turn, the last ones   CL blocks of a cluster, at most 8
//   SHARED_BYTES of dynamic shared memory
//
// Letters: R rows, H heads, W window places, K selected places.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int KEYS = 64, THREADS = 256, WARPS = 8, HEADS = 16, CHUNKS = 2;
constexpr int ROW = C + 8;                  // bf16 values of a row in shared memory: no bank twice
constexpr int P_ROW = KEYS + 8, S_ROW = KEYS + 2, PART_ROW = C + 4;
constexpr int CHAINS = 4;                   // independent sums of a score
constexpr int WIDE = C / WARPS, TILES = WIDE / 8;   // channels of a warp's sums, mma tiles of them
constexpr int STATS = CHUNKS * HEADS * 2;   // tops and sums of a block
static_assert(C == 512, "records of other sizes are not made of 16-byte pieces");
static_assert(CHUNKS * CL <= 16, "the chunks of a head are looked at by half a warp");

struct Params {
    const u16* q;             // bf16 [R, q_stride], before rotation
    const float* cosines;     // [R, PAIRS]
    const float* sines;
    const u8* window;         // records of C + C / 32 bytes
    const u8* main;           // records of C / 2 + C / 16 bytes
    const int* window_rows;   // [R, W], -1 in empty places
    const int* main_rows;     // [R, K]
    const float* sink;        // [H]
    u16* out;                 // bf16 [R, H, C], turned back
    int heads, q_stride, window_places, main_places;
    int window_blocks;        // blocks of a cluster that work on the window
    float scale;
};

// ---- machine instructions (tests/kernels/emulated has their counterparts) ------------------

#ifndef EMULATED
__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void dependency_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_turned_matrices(u32 (&d)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ u32 bf16s_of_e4m3(u16 two) {
    u32 v, pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
    asm("{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, %1; cvt.f32.f16 a, l; cvt.f32.f16 b, h;\n"
        "cvt.rn.bf16x2.f32 %0, b, a; }" : "=r"(v) : "r"(pair));
    return v;
}
__device__ __forceinline__ u32 times_bf16(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Shared memory of another block of the cluster.
__device__ __forceinline__ void store_there(float* to, u32 rank, float v) {
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.f32 [there], %2; }"
                 ::"r"(shared_address(to)), "r"(rank), "f"(v) : "memory");
}
__device__ __forceinline__ float4 load_there(const float* from, u32 rank) {
    float4 v;
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(shared_address(from)), "r"(rank) : "memory");
    return v;
}
__device__ __forceinline__ float divide(float a, float b) {
    float v;
    asm("div.full.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
extern __shared__ __align__(128) u8 raw[];
#define CLUSTER __cluster_dims__(CL, 1, 1)
#endif

// ---- formats -------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }

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

// What a thread reads of a chunk's records.
template <bool WINDOW> struct Pieces {
    static constexpr int OF_KEY = C / (WINDOW ? 16 : 32), EACH = KEYS * OF_KEY / THREADS;
    static constexpr int RECORD = WINDOW ? C + C / 32 : C / 2 + C / 16;
    uint4 codes[EACH];
    u16 scales[EACH];

    __device__ __forceinline__ void load(const u8* cache, const int* address) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int piece = threadIdx.x + i * THREADS, at = address[piece / OF_KEY], p = piece % OF_KEY;
            codes[i] = make_uint4(0, 0, 0, 0), scales[i] = 0;
            if (at >= 0) {
                const u8* record = cache + (long long)at * RECORD;
                codes[i] = *(const uint4*)(record + 16 * p);
                scales[i] = WINDOW ? record[C + p / 2] : *(const u16*)(record + C / 2 + 2 * p);
            }
        }
    }

    __device__ __forceinline__ void unpack(u16* keys) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int piece = threadIdx.x + i * THREADS, p = piece % OF_KEY;
            u16* row = keys + piece / OF_KEY * ROW + (WINDOW ? 8 : 16) * p;
            u32 words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
            if (WINDOW) {
                u32 s = (u32)scales[i] * 0x00800080u, e[4], o[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    u32 a = bf16s_of_e4m3((u16)(words[k] & 0xFFFF)), b = bf16s_of_e4m3((u16)(words[k] >> 16));
                    e[k] = times_bf16(__byte_perm(a, b, 0x5410), s);
                    o[k] = times_bf16(__byte_perm(a, b, 0x7632), s);
                }
                *(uint4*)row = make_uint4(e[0], e[1], e[2], e[3]);
                *(uint4*)(row + C / 2) = make_uint4(o[0], o[1], o[2], o[3]);
                continue;
            }
            u32 both = bf16s_of_e4m3(scales[i]);
            u32 scale[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 e[2][2], o[2][2], s = scale[half];
                unpack_e2m1(words[2 * half], e[0], o[0]);
                unpack_e2m1(words[2 * half + 1], e[1], o[1]);
                *(uint4*)(row + 8 * half) = make_uint4(
                    times_bf16(e[0][0], s), times_bf16(e[0][1], s), times_bf16(e[1][0], s),
                    times_bf16(e[1][1], s));
                *(uint4*)(row + C / 2 + 8 * half) = make_uint4(
                    times_bf16(o[0][0], s), times_bf16(o[0][1], s), times_bf16(o[1][0], s),
                    times_bf16(o[1][1], s));
            }
        }
    }
};

// Queries of 16 heads: read, then turned and stored.
struct Queries {
    static constexpr int PIECES = C / 8, EACH = HEADS * PIECES / THREADS, STILL = C - 2 * PAIRS;
    uint4 codes[EACH];

    __device__ __forceinline__ void load(const Params& p, int row, int head) {
        const u16* q = p.q + (long long)row * p.q_stride + head * C;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int piece = threadIdx.x + i * THREADS;
            codes[i] = make_uint4(0, 0, 0, 0);
            if (head + piece / PIECES < p.heads) codes[i] = *(const uint4*)(q + 8 * piece);
        }
    }

    __device__ __forceinline__ void store(u16* out, const Params& p, int row) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int piece = threadIdx.x + i * THREADS, channel = piece % PIECES * 8;
            u16* to = out + piece / PIECES * ROW + channel / 2;
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
            *(uint2*)to = make_uint2(
                __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410));
            *(uint2*)(to + C / 2) = make_uint2(
                __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
        }
    }
};

// scores [HEADS, S_ROW]: queries times keys; a warp has 8 keys.
__device__ __forceinline__ void score(float* scores, u32 queries, u32 keys) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8;
    float sum[CHAINS][4] = {};
    u32 q_at = queries + 2 * (lane % 16 * ROW + lane / 16 * 8);
    u32 k_at = keys + 2 * ((first + lane % 8) * ROW + lane / 8 * 8);
#pragma unroll 4
    for (int k = 0; k < C / 32; k++) {
        u32 a[2][4], b[4];
        load_matrices(b, k_at + 64 * k);
        load_matrices(a[0], q_at + 64 * k);
        load_matrices(a[1], q_at + 64 * k + 32);
        multiply(sum[2 * k % CHAINS], a[0], b[0], b[1], true);
        multiply(sum[(2 * k + 1) % CHAINS], a[1], b[2], b[3], true);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float all = sum[0][i] + sum[1][i] + sum[2][i] + sum[3][i];
        scores[(lane / 4 + i / 2 * 8) * S_ROW + first + lane % 4 * 2 + i % 2] = all;
    }
}

// Probabilities relative to the chunk's top, bf16 [HEADS, P_ROW]; tops and their sums.
__device__ __forceinline__ void weigh(
    u16* weights, const float* scores, const int* address, float scale, float* tops, float* totals
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float v[2][2], top[2], total[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] = -1e30f;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            v[i][k] = scores[(2 * warp + i) * S_ROW + 2 * lane + k] * scale;
            if (address[2 * lane + k] < 0) v[i][k] = -__uint_as_float(0x7F800000u);
            top[i] = fmaxf(top[i], v[i][k]);
        }
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2)
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], by));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v[i][0] = __expf(v[i][0] - top[i]), v[i][1] = __expf(v[i][1] - top[i]);
        total[i] = v[i][0] + v[i][1];
        *(u32*)(weights + (2 * warp + i) * P_ROW + 2 * lane) = pack_bf16(v[i][0], v[i][1]);
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2)
#pragma unroll
        for (int i = 0; i < 2; i++) total[i] += __shfl_xor_sync(~0u, total[i], by);
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) tops[2 * warp + i] = top[i], totals[2 * warp + i] = total[i];
}

// sum: probabilities times keys; a warp has WIDE channels.
__device__ __forceinline__ void add_up(float (&sum)[TILES][4], u32 weights, u32 keys) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 v_at = keys + 2 * (lane % 16 * ROW + warp * WIDE + lane / 16 * 8);
    u32 p_at = weights + 2 * (lane % 16 * P_ROW + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        u32 a[4];
        load_matrices(a, p_at + 32 * k);
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            u32 b[4];
            load_turned_matrices(b, v_at + 2 * (16 * ROW * k + 8 * n));
            multiply(sum[n], a, b[0], b[1], true);
            multiply(sum[n + 1], a, b[2], b[3], true);
        }
    }
}

struct Shared {
    u16* keys;         // [KEYS, ROW]; later the block's part of the output, float [HEADS, PART_ROW]
    u16* queries;      // [HEADS, ROW]
    u16* weights;      // [HEADS, P_ROW]
    float* scores;     // [HEADS, S_ROW]
    int* address;      // [CHUNKS, KEYS]
    float* own;        // [tops or sums, CHUNKS, HEADS] of this block
    float* stats;      // the same of all blocks, [CL, STATS]
    float* shares;     // [CHUNKS, HEADS]
    float* totals;     // [HEADS]
};

// A block's chunks: their sums, and their tops and totals in `own`.
template <bool WINDOW>
__device__ __forceinline__ void run_chunks(
    float (&sum)[CHUNKS][TILES][4], const Shared& s, const Params& p, const Queries& queries, int row, u32 live
) {
    Pieces<WINDOW> pieces;
    const u8* cache = WINDOW ? p.window : p.main;
    pieces.load(cache, s.address);
    queries.store(s.queries, p, row);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (!(live >> c & 1)) continue;   // nobody there
        if (WINDOW && c > 0) pieces.load(cache, s.address + c * KEYS);   // too many to have waiting
        if (c > 0) __syncthreads();       // the chunk before has been used
        pieces.unpack(s.keys);
        if (!WINDOW && c + 1 < CHUNKS) pieces.load(cache, s.address + (c + 1) * KEYS);
        __syncthreads();
        score(s.scores, shared_address(s.queries), shared_address(s.keys));
        __syncthreads();
        weigh(s.weights, s.scores, s.address + c * KEYS, p.scale, s.own + c * HEADS,
              s.own + (CHUNKS + c) * HEADS);
        __syncthreads();
        add_up(sum[c], shared_address(s.weights), shared_address(s.keys));
    }
}

// Half a warp a head: what each chunk's sums count, and what all are divided by.
__device__ __forceinline__ void share_out(const Shared& s, const Params& p, int head, int rank) {
    const int h = threadIdx.x / 16, chunk = threadIdx.x % 16;
    float top = -1e30f, total = 0.f, sink = head + h < p.heads ? p.sink[head + h] : 0.f;
    if (chunk < CHUNKS * CL) {
        const float* of_block = s.stats + chunk / CHUNKS * STATS + chunk % CHUNKS * HEADS + h;
        top = of_block[0], total = of_block[CHUNKS * HEADS];
    }
    float highest = fmaxf(sink, top);
#pragma unroll
    for (int by = 8; by > 0; by /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, by));
    const float share = __expf(top - highest);
    total *= share;
#pragma unroll
    for (int by = 8; by > 0; by /= 2) total += __shfl_xor_sync(~0u, total, by);
    if (chunk / CHUNKS == rank) s.shares[chunk % CHUNKS * HEADS + h] = share;
    if (chunk == 0) s.totals[h] = total + __expf(sink - highest);
}

// ---- kernel --------------------------------------------------------------------------------

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 2)
attend_kernel(const __grid_constant__ Params p) {
    Shared s;
    s.keys = (u16*)raw;
    s.queries = s.keys + KEYS * ROW;
    s.weights = s.queries + HEADS * ROW;
    s.scores = (float*)(s.weights + HEADS * P_ROW);
    s.address = (int*)(s.scores + HEADS * S_ROW);
    s.own = (float*)(s.address + CHUNKS * KEYS);
    s.stats = s.own + STATS;
    s.shares = s.stats + CL * STATS;
    s.totals = s.shares + CHUNKS * HEADS;
    const int rank = blockIdx.x % CL, head = blockIdx.x / CL * HEADS, row = blockIdx.y;
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool window = rank < p.window_blocks;
    cluster_arrive();      // whoever writes into another block's memory waits until that block runs
    launch_dependents();   // what follows may start to wait
    dependency_wait();
    Queries queries;
    queries.load(p, row, head);
    if (t < CHUNKS * KEYS) {
        const int place = (window ? rank : rank - p.window_blocks) * (CHUNKS * KEYS) + t;
        const int places = window ? p.window_places : p.main_places;
        const int* list = window ? p.window_rows : p.main_rows;
        s.address[t] = place < places ? list[(long long)row * places + place] : -1;
    }
    if (t < STATS) s.own[t] = t < CHUNKS * HEADS ? -1e30f : 0.f;
    __syncthreads();
    u32 live = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int* a = s.address + c * KEYS;
        live |= (__ballot_sync(~0u, a[lane] >= 0 || a[lane + 32] >= 0) != 0) << c;
    }
    float sum[CHUNKS][TILES][4] = {};
    if (live && window)
        run_chunks<true>(sum, s, p, queries, row, live);
    else if (live)
        run_chunks<false>(sum, s, p, queries, row, live);
    __syncthreads();

    // Tops and totals of all chunks to all blocks.
    cluster_wait();
    for (int i = t; i < CL * STATS; i += THREADS) store_there(s.stats + rank * STATS + i % STATS, i / STATS, s.own[i % STATS]);
    cluster_arrive();
    cluster_wait();
    share_out(s, p, head, rank);
    __syncthreads();

    // The block's part of the output, then its share of the sum over blocks.
    float* part = (float*)s.keys;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int h = lane / 4 + 8 * half;
        const float first = s.shares[h], second = s.shares[HEADS + h];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float2 two;
            two.x = first * sum[0][n][2 * half] + second * sum[1][n][2 * half];
            two.y = first * sum[0][n][2 * half + 1] + second * sum[1][n][2 * half + 1];
            *(float2*)(part + h * PART_ROW + warp * WIDE + 8 * n + lane % 4 * 2) = two;
        }
    }
    cluster_arrive();
    cluster_wait();
    constexpr int ITEMS = HEADS * C / 8;
    for (int item = t * CL + rank; item < ITEMS; item += THREADS * CL) {
        const int h = item / (C / 8), n = item % (C / 8) * 4;
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int r = 0; r < CL; r++) {
            float4 e = load_there(part + h * PART_ROW + n, r), o = load_there(part + h * PART_ROW + C / 2 + n, r);
            even[0] += e.x, even[1] += e.y, even[2] += e.z, even[3] += e.w;
            odd[0] += o.x, odd[1] += o.y, odd[2] += o.z, odd[3] += o.w;
        }
        u32 words[4];
        const float total = s.totals[h];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            words[k] = pack_bf16(divide(even[k], total), divide(odd[k], total));
            const int pair = n + k - (C / 2 - PAIRS);
            if (pair >= 0) {
                float e = bf16_value(words[k] & 0xFFFF), o = bf16_value(words[k] >> 16);
                float c = p.cosines[row * PAIRS + pair], i = p.sines[row * PAIRS + pair];
                words[k] = pack_bf16(e * c + o * i, o * c - e * i);
            }
        }
        if (head + h < p.heads)
            *(uint4*)(p.out + ((long long)row * p.heads + head + h) * C + 2 * n) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
    cluster_arrive();   // the others may still read this block's part
    cluster_wait();
}
