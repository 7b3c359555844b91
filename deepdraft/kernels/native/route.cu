// Router of a decode step, sm_90: logits of 8 rows, each row's picks, the list of distinct experts.
//
// A block has OWN experts and all columns; its WARPS warps share the columns and are added in order.
// The block that arrives last chooses: a warp a row, then the list (kernels.routing.route_listed).
// Weights do not wait for the kernel before: they are in registers when the rows come.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   E  experts   K  picks of a row, at most 8   OWN  experts of a block, at most 8
//   SHARED_BYTES of dynamic shared memory
//
// Letters: R rows, D hidden, G = D / 32, L = 8 K places of a row tile's list.

#include "machine.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, T = 8, L = T * K;
constexpr int BATCH = 10;                       // groups of 32 columns that a warp reads at once
constexpr int EACH = (E + 31) / 32;             // experts of a lane

struct Params {
    const u16* v;          // bf16 [R, D]
    const u16* w;          // bf16 [E / tile, G, tile, 32]
    const float* bias;     // [E]
    const int* live;       // [R], below 0: the row does not count
    const int* forced;     // [R, K] or null: picks of the list
    int* picks;            // [R, K]
    float* weights;        // [R, K]
    int* experts;          // [R / 8, L]
    int* slots;            // [R / 8, L, 8]
    float2* scores;        // [R, E]: a score, and what it is ranked by
    int* arrive;           // [R / 8], zero between launches
    int groups, tile;
    float temperature, scale;
};

// ---- choice --------------------------------------------------------------------------------

// sqrt(softplus(x)); kernels.routing.softplus says how.
__device__ __forceinline__ float score_of(float x) {
    float e = __expf(-fabsf(x)), s = __fdiv_rn(e, 2.f + e), q = s * s;
    float series = 1.f / 15 + q * (1.f / 17);
    series = 1.f / 11 + q * (1.f / 13 + q * series);
    series = 1.f / 7 + q * (1.f / 9 + q * series);
    series = 1.f + q * (1.f / 3 + q * (1.f / 5 + q * series));
    return __fsqrt_rn(fmaxf(x, 0.f) + 2.f * s * series);
}

// Floats as integers in the same order.
__device__ __forceinline__ u32 order_of(float v) {
    u32 bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One row by one warp. `picked`: where its picks for the list go.
__device__ __forceinline__ void choose(const Params& p, int row, int* picked) {
    const int lane = threadIdx.x % 32;
    const bool live = p.live[row] >= 0;
    float scores[EACH], chosen = 0.f, total = 0.f;
    u32 ranked[EACH];
    int pick = -1;   // of lane k the k-th one, and its score
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = lane + 32 * i;
        scores[i] = 0.f, ranked[i] = 0;
        if (e < E) {
            float2 both = __ldcg(p.scores + (long long)row * E + e);
            scores[i] = both.x, ranked[i] = order_of(both.y);
        }
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        u32 best = ranked[0];
        float own = scores[0];
        int at = lane;
#pragma unroll
        for (int i = 1; i < EACH; i++)
            if (ranked[i] > best) best = ranked[i], own = scores[i], at = lane + 32 * i;
        u32 most = __reduce_max_sync(~0u, best);
        // Equal scores go to the lower expert; none is beyond the last one.
        at = min(__reduce_min_sync(~0u, best == most ? (u32)at : ~0u), (u32)E - 1);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (at == lane + 32 * i) ranked[i] = 0;
        float score = __shfl_sync(~0u, own, at % 32);   // the best of all is its lane's best
        total += score;
        if (lane == k) pick = at, chosen = score;
    }
    if (lane < K) {
        if (!live) pick = -1;
        p.picks[row * K + lane] = pick;
        p.weights[row * K + lane] = live ? __fdiv_rn(chosen, total + 1e-20f) * p.scale : 0.f;
        picked[lane] = p.forced ? p.forced[row * K + lane] : pick;
    }
}

// The distinct experts of L picks in the order of their first pick. `firsts`: of each warp of picks,
// which are the first of their expert.
__device__ __forceinline__ void list(const Params& p, const int* picked, int* slots, u32* firsts, int row_tile) {
    const int i = threadIdx.x;
    for (int at = i; at < L * T; at += THREADS) slots[at] = -1;
    const int pick = i < L ? picked[i] : -1;
    int place = i;
#pragma unroll
    for (int j = L - 1; j >= 0; j--)
        if (j < i && picked[j] == pick) place = j;
    const bool first = pick >= 0 && place == i;
    const u32 found = __ballot_sync(~0u, first);
    if (i % 32 == 0 && i < 64) firsts[i / 32] = found;
    __syncthreads();
    if (i < L) {
        const u32 low = firsts[0], high = firsts[1];
        const int count = __popc(low) + __popc(high);
        const u32 before = (1u << place % 32) - 1;
        const int rank = place < 32 ? __popc(low & before) : __popc(low) + __popc(high & before);
        if (pick >= 0) slots[rank * T + i / K] = i % K;
        if (first) p.experts[row_tile * L + rank] = pick;
        if (i >= count) p.experts[row_tile * L + i] = -1;
    }
    __syncthreads();
    for (int at = i; at < L * T; at += THREADS) p.slots[row_tile * L * T + at] = slots[at];
}

// ---- kernel --------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS) route_kernel(const __grid_constant__ Params p) {
    float* sums = (float*)raw;                       // [WARPS, OWN, T]
    int* picked = (int*)(sums + WARPS * OWN * T);    // [T, K]
    u32* firsts = (u32*)(picked + L);                // [2]
    int* slots = (int*)(firsts + 2);                 // [L, T]
    int* last = slots + L * T;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_tile = blockIdx.y, expert = blockIdx.x * OWN + g;
    const bool mine = g < OWN && expert < E;
    const u16* w = p.w + ((long long)(expert / p.tile) * p.groups * p.tile + expert % p.tile) * 32 + 8 * t;
    const u16* v = p.v + (long long)(row_tile * T + g) * p.groups * 32 + 8 * t;
    float sum[4] = {};
    for (int begin = warp; begin < p.groups; begin += WARPS * BATCH) {
        uint4 a[BATCH], b[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int group = begin + i * WARPS;
            a[i] = make_uint4(0, 0, 0, 0);
            if (mine && group < p.groups) a[i] = *(const uint4*)(w + (long long)group * p.tile * 32);
        }
        if (begin == warp) dependency_wait();
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int group = begin + i * WARPS;
            b[i] = make_uint4(0, 0, 0, 0);
            if (group < p.groups) b[i] = *(const uint4*)(v + group * 32);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            // Columns in the same other order on both sides.
            const u32 low[4] = {a[i].x, 0, a[i].y, 0}, high[4] = {a[i].z, 0, a[i].w, 0};
            multiply(sum, low, b[i].x, b[i].y, true);
            multiply(sum, high, b[i].z, b[i].w, true);
        }
    }
    if (warp >= p.groups) dependency_wait();   // a warp without columns
    if (g < OWN) {
        sums[(warp * OWN + g) * T + 2 * t] = sum[0];
        sums[(warp * OWN + g) * T + 2 * t + 1] = sum[1];
    }
    __syncthreads();
    if (threadIdx.x < OWN * T) {
        float all = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) all += sums[i * OWN * T + threadIdx.x];
        int e = blockIdx.x * OWN + threadIdx.x / T, row = row_tile * T + threadIdx.x % T;
        if (e < E) {
            float score = score_of(__fdiv_rn(all, p.temperature));
            float2 both = {score, score + p.bias[e]};
            __stcg(p.scores + (long long)row * E + e, both);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) *last = arrive(p.arrive + row_tile) == (int)gridDim.x - 1;
    __syncthreads();
    // Not before: what follows would keep the multiprocessors from others' work, and has nothing to
    // do before the list is there.
    launch_dependents();
    if (!*last) return;
    if (threadIdx.x == 0) p.arrive[row_tile] = 0;
    if (warp < T) choose(p, row_tile * T + warp, picked + warp * K);
    __syncthreads();
    list(p, picked, slots, firsts, row_tile);
}
