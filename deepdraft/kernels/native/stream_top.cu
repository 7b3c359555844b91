// Index scores of many rows of one sequence and the K best entries of each, in one pass, sm_90
// (kernels.prefill_index.stream_top). Scores never leave the chip.
//
// A block has ROWS rows, whose queries wait in shared memory, and goes over all entries: its two warp groups
// take tiles of 128 in turn, one multiplies while the other unpacks keys and adds up heads. A score that
// beats its row's bar joins the row's candidates. After every TURNS tiles of each group a warp looks at
// each row: where there is not room for as many again, the candidates are cut to the K best and the bar is the
// worst of them. All entries after a cut come later than those before, so what equals the bar has lost;
// among candidates equal scores go to the lower entry. So a row's set is that of a sort.
//
// Built once for each size (deepdraft/kernels/native/build.py):
//   HELD   candidates of a row, at least K + 256 TURNS and a multiple of 32   TURNS   as above
//   SHARED_BYTES of dynamic shared memory
//
// Letters: R rows, K places of a list.

#include "machine.cuh"
#include "groups.cuh"
#include "keys.cuh"

constexpr int THREADS = 256, TILE = 128, PAIRS = ROWS / 2, EACH = HELD / 32;

struct Params {
    const u16* queries;    // bf16 [R, H, C]
    const void* weights;   // [R, weight_stride], columns weight_start..+H
    const u8* keys;        // [*, RECORD]
    const int* base;       // [R], all the same
    const int* reach;      // [R]
    int* entries;          // [R, K], -1 beyond the last
    int* address;          // the same plus base
    int* counts;           // [R]
    int rows, picks, weight_stride, weight_start, weight_bf16, skip;
    float weight_scale;
};

struct Shared {
    u8* queries;           // two panels of each pair
    float* weights;        // [ROWS, H]
    u32* keys;             // [ROWS, HELD]: scores as integers of the same order
    int* entries;          // [ROWS, HELD]
    int *reach, *count;    // [ROWS]: reach is 0 where all entries are taken whatever their scores
    float* bar;            // [ROWS]
};

__device__ __forceinline__ u32 key_of(float score) {   // of scores above -infinity
    u32 bits = score == 0.f ? 0 : __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}
__device__ __forceinline__ int sum_of_warp(int v) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(~0u, v, by);
    return v;
}

// A warp: the K best of a row's candidates to the front, in no order; the worst of them. More than K.
__device__ __forceinline__ u32 cut(u32* keys, int* entries, int count, int picks) {
    const int lane = threadIdx.x % 32;
    u32 own[EACH], least = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) own[i] = i * 32 + lane < count ? keys[i * 32 + lane] : 0;
#pragma unroll 1
    for (u32 bit = 1u << 31; bit > 0; bit >>= 1) {
        int number = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) number += own[i] >= (least | bit);
        if (sum_of_warp(number) >= picks) least |= bit;
    }
    int above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) above += own[i] > least, equal += own[i] == least;
    const int need = picks - sum_of_warp(above);
    int last = 0x7FFFFFFF;   // of those equal to the worst one, entries up to this
    if (sum_of_warp(equal) > need) {
        last = 0;
#pragma unroll 1
        for (int bit = 1 << 30; bit > 0; bit >>= 1) {
            int number = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (own[i] == least) number += entries[i * 32 + lane] < (last | bit);
            if (sum_of_warp(number) < need) last |= bit;
        }
    }
    int kept = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int entry = entries[i * 32 + lane];
        const bool take = own[i] > least || (own[i] == least && entry <= last);
        const u32 taken = __ballot_sync(~0u, take);   // all have read before one writes further ahead
        const int place = kept + __popc(taken & ((1u << lane) - 1));
        if (take) keys[place] = own[i], entries[place] = entry;
        __syncwarp();
        kept += __popc(taken);
    }
    return least;
}

// A warp: the first `count` entries in ascending order; there is room for the next power of two.
__device__ __forceinline__ void sort_entries(int* entries, int count) {
    const int lane = threadIdx.x % 32;
    int side = 32;
    while (side < count) side *= 2;
    for (int i = count + lane; i < side; i += 32) entries[i] = 0x7FFFFFFF;
    __syncwarp();
    for (int k = 2; k <= side; k *= 2)
        for (int j = k / 2; j > 0; j /= 2) {
            for (int i = lane; i < side; i += 32) {
                const int other = i ^ j;
                const int a = entries[i], b = entries[other];
                if (other > i && (a > b) == ((i & k) == 0) && a != b) entries[i] = b, entries[other] = a;
            }
            __syncwarp();
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_top_kernel(const __grid_constant__ Params p) {
    Shared s;
    s.queries = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    s.weights = (float*)(s.queries + ROWS * PANEL);
    s.keys = (u32*)(s.weights + ROWS * HEADS);
    s.entries = (int*)(s.keys + ROWS * HELD);
    s.reach = s.entries + ROWS * HELD, s.count = s.reach + ROWS, s.bar = (float*)(s.count + ROWS);
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, row0 = blockIdx.x * ROWS;
    const float none = -__uint_as_float(0x7F800000u);
    if (t < ROWS) {
        const int reach = row0 + t < p.rows ? p.reach[row0 + t] : 0;
        s.reach[t] = reach > p.skip ? reach : 0, s.count[t] = 0, s.bar[t] = none;
    }
    for (int task = t; task < ROWS * HEADS * 4; task += THREADS) {
        const int n = task / 4 % 64, row = row0 + task / 256 * 2 + n / HEADS, j = task % 4;
        const u16* from = p.queries + ((long long)row * HEADS + n % HEADS) * CHANNELS + 32 * j;
        put_query(s.queries, task / 256, n, j, row < p.rows ? from : nullptr);
    }
    for (int i = t; i < ROWS * HEADS; i += THREADS) {
        float w = 0.f;
        if (row0 + i / HEADS < p.rows) {
            const long long at = (long long)(row0 + i / HEADS) * p.weight_stride + p.weight_start + i % HEADS;
            w = head_weight(p.weights, at, p.weight_bf16, p.weight_scale);
        }
        s.weights[i] = w;
    }
    reads_done();   // stores come before what the products read, too
    __syncthreads();
    int end = 0;
    for (int i = 0; i < ROWS; i++) end = max(end, s.reach[i]);
    const int base = p.base[row0];
    const u8* keys = p.keys + (long long)base * RECORD;
    const int own = t / 128 * TILE + warp % 4 * 32, g = lane / 4;
    KeyWords words;
    if (end > 0) ask_keys(words, keys, own, end);
    for (int part = 0; part < end; part += 2 * TILE * TURNS) {
        for (int start = part; start < min(part + 2 * TILE * TURNS, end); start += 2 * TILE) {
            if (start + t / 128 * TILE >= end) break;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float dots[PAIRS][32];
                dots_of<PAIRS>(dots, words, keys, start + own + (half == 0 ? 16 : 2 * TILE), end,
                               shared_address(s.queries));
                const int entry = start + own + 16 * half + g + 8 * (lane % 2);
#pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    const float score = pair_score(dots[i], s.weights + 2 * i * HEADS);
                    const int row = 2 * i + lane % 4 / 2;
                    if (score > s.bar[row] && entry < s.reach[row]) {
                        const int place = row * HELD + atomicAdd(s.count + row, 1);
                        s.keys[place] = key_of(score), s.entries[place] = entry;
                    }
                }
            }
        }
        __syncthreads();
        const int count = s.count[warp];
        if (count > HELD - 2 * TILE * TURNS) {
            const u32 worst = cut(s.keys + warp * HELD, s.entries + warp * HELD, count, p.picks);
            if (lane == 0) s.count[warp] = p.picks, s.bar[warp] = score_of(worst);
        }
        __syncthreads();
    }
    const int row = row0 + warp;
    if (row >= p.rows) return;
    int* found = s.entries + warp * HELD;
    int total = s.count[warp];
    const bool few = s.reach[warp] == 0;
    if (few) total = min(p.reach[row], p.picks);
    else {
        if (total > p.picks) cut(s.keys + warp * HELD, found, total, p.picks), total = p.picks;
        __syncwarp();
        sort_entries(found, total);
    }
    if (lane == 0) p.counts[row] = total;
    for (int k = lane; k < p.picks; k += 32) {
        const int entry = k >= total ? -1 : few ? k : found[k];
        p.entries[(long long)row * p.picks + k] = entry;
        p.address[(long long)row * p.picks + k] = entry < 0 ? -1 : entry + base;
    }
}
