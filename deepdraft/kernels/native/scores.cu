// Scores of all index entries for the few rows of a step, and the best of every 32, sm_90
// (kernels.index.index_scores).
//
// One block stays on each multiprocessor; its two warp groups take tiles of 128 entries in turn, so that
// one multiplies while the other unpacks keys and adds up heads. A key is read and unpacked once for all
// rows of its sequence, straight into the registers that the product takes it from; queries of up to 8
// rows wait in shared memory. Rows of other sequences take turns. Rows that do not count cost nothing.
//
// Letters: R rows.

#include "machine.cuh"
#include "groups.cuh"
#include "keys.cuh"

constexpr int THREADS = 256, TILE = 128, GROUP = 32;

struct Params {
    const u16* queries;    // bf16 [R, H, C]
    const void* weights;   // [R, weight_stride], columns weight_start..+H
    const u8* keys;        // [*, RECORD]
    const int* base;       // [R]
    const int* reach;      // [R]
    float* scores;         // [R, capacity]
    float* best;           // [R, groups]: of every 32 entries, or null
    int rows, capacity, groups, weight_stride, weight_start, weight_bf16, skip;
    float weight_scale;
};

struct Shared {
    u8* queries;           // two panels of each pair
    float* weights;        // [ROWS, H]
    int *reach, *base;     // [ROWS] of the block's rows
    int *row, *end;        // [ROWS] of those of the sequence at hand: number in the launch, reach
};

template <int PAIRS>
__device__ __forceinline__ void score_tiles(const Params& p, const Shared& s, const u8* keys, int end) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = threadIdx.x / 32 % 4 * 32;
    const int step = gridDim.x * (THREADS / 128) * TILE;
    int start = (blockIdx.x + gridDim.x * (threadIdx.x / 128)) * TILE;
    const float none = -__uint_as_float(0x7F800000u);
    KeyWords words;
    if (start < end) ask_keys(words, keys, start + own, end);
    for (; start < end; start += step) {
        float top[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; i++) top[i] = none;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float dots[PAIRS][32];
            dots_of<PAIRS>(dots, words, keys, half == 0 ? start + own + 16 : start + step + own, end,
                           shared_address(s.queries));
            const int entry = start + own + 16 * half + g + 8 * (t % 2);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const float score = pair_score(dots[i], s.weights + 2 * i * HEADS);
                const int mine = 2 * i + t / 2;
                if (entry < s.end[mine]) {
                    p.scores[(long long)s.row[mine] * p.capacity + entry] = score;
                    top[i] = fmaxf(top[i], score);
                }
            }
        }
        if (!p.best) continue;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
#pragma unroll
            for (int by = 4; by < 32; by *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], by));
            const int mine = 2 * i + t / 2;
            if (g == 0 && t % 2 == 0 && start + own < s.end[mine])
                p.best[(long long)s.row[mine] * p.groups + (start + own) / GROUP] = top[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scores_kernel(const __grid_constant__ Params p) {
    Shared s;
    s.queries = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    s.weights = (float*)(s.queries + ROWS * PANEL);
    s.reach = (int*)(s.weights + ROWS * HEADS);
    s.base = s.reach + ROWS, s.row = s.base + ROWS, s.end = s.row + ROWS;
    const int t = threadIdx.x, row0 = blockIdx.y * ROWS;
    launch_dependents();   // what follows may start to wait
    dependency_wait();
    if (t < ROWS) {
        const bool here = row0 + t < p.rows;
        const int reach = here ? p.reach[row0 + t] : 0;
        s.reach[t] = reach > p.skip ? min(reach, p.capacity) : 0;
        s.base[t] = here ? p.base[row0 + t] : 0;
    }
    __syncthreads();
    for (int lead = 0; lead < ROWS; lead++) {
        // The rows of lead's sequence, where it is the first of them.
        int count = 0, end = 0;
        for (int i = 0; i < ROWS; i++) {
            if (s.reach[i] == 0 || s.base[i] != s.base[lead]) continue;
            if (i < lead) break;
            count++, end = max(end, s.reach[i]);
        }
        if (s.reach[lead] == 0 || blockIdx.x * TILE >= end) continue;
        __syncthreads();   // the queries before are no longer read
        if (t < ROWS) {
            int found = 0;
            s.end[t] = 0;
            for (int i = lead; i < ROWS; i++)
                if (s.reach[i] > 0 && s.base[i] == s.base[lead] && found++ == t)
                    s.row[t] = row0 + i, s.end[t] = s.reach[i];
        }
        __syncthreads();
        const int pairs = (count + 1) / 2;
        for (int task = t; task < pairs * 64 * 4; task += THREADS) {
            const int n = task / 4 % 64, at = task / 256 * 2 + n / HEADS, j = task % 4;
            const u16* from = nullptr;
            if (at < count) from = p.queries + ((long long)s.row[at] * HEADS + n % HEADS) * CHANNELS + 32 * j;
            put_query(s.queries, task / 256, n, j, from);
        }
        for (int i = t; i < pairs * 2 * HEADS; i += THREADS) {
            float w = 0.f;
            if (i / HEADS < count) {
                const long long at = (long long)s.row[i / HEADS] * p.weight_stride + p.weight_start + i % HEADS;
                w = head_weight(p.weights, at, p.weight_bf16, p.weight_scale);
            }
            s.weights[i] = w;
        }
        reads_done();   // stores come before what the products read, too
        __syncthreads();
        const u8* keys = p.keys + (long long)s.base[lead] * RECORD;
        if (pairs == 1) score_tiles<1>(p, s, keys, end);
        else if (pairs == 2) score_tiles<2>(p, s, keys, end);
        else if (pairs == 3) score_tiles<3>(p, s, keys, end);
        else score_tiles<4>(p, s, keys, end);
    }
}
