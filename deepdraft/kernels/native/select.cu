// The K best scores of a row, ascending by place, sm_90: one block a row (kernels.index.select_top).
//
// Rows too long for this go by two levels. The K best lie in the K groups whose best scores are the best,
// lower groups first among equals: each group before another has an entry that comes before all of the
// other's. So the first level selects groups by their best scores, the second reads those groups only.
//
// The row is read once, into shared memory. A histogram of scores finds the bin of the K-th best, the
// bin's few scores are compared with one another; where a bin holds many (equal or close ones),
// histograms of what is left of the range follow. Equal scores are taken from the front. Integer
// counts alone decide, so the result is exact and that of any other correct selection.
//
// Built once for each size of rows (deepdraft/kernels/native/build.py):
//   PLACES  scores of a row, a multiple of 1,024   SHARED_BYTES of dynamic shared memory
//   GATHER  0: scores are read by place; n: a place is the best of n scores of its entry
//
// Letters: R rows.

#include "machine.cuh"

constexpr int THREADS = 1024, WARPS = 32, BINS = 2 * THREADS, BATCH = 8;
constexpr u32 INFINITE = 0xFF800000u;   // the key of +infinity

struct Params {
    const float* scores;   // [R, capacity]
    const int* reach;      // [R]
    const int* length;     // [R]: (length * mul) / div, rounded up, scores of a row count
    const int* blocks;     // [R, keep]: of candidate blocks of `block` entries, or null
    const int* base;       // [R]
    int* entries;          // [R, picks], -1 beyond the last
    int* address;          // the same plus base
    int* counts;           // [R]
    int capacity, picks, skip, mul, div, keep, block;
    int newest;            // the last place comes before all
};

// The entry of a place.
__device__ __forceinline__ int entry_of(const Params& p, int row, int place) {
    if (!p.blocks) return place;
    return p.blocks[(long long)row * p.keep + place / p.block] * p.block + place % p.block;
}

// The score of a place; -inf where there is none.
__device__ __forceinline__ float score_at(const Params& p, int row, int place, int reach) {
    const float* scores = p.scores + (long long)row * p.capacity;
    if (!GATHER) return scores[place];
    const int first = entry_of(p, row, place) * GATHER;
    float best = -__uint_as_float(0x7F800000u);
#pragma unroll
    for (int i = 0; i < GATHER; i++)
        if (first + i < reach) best = fmaxf(best, scores[first + i]);
    return best;
}

// Whether a place is the one of the last entry.
__device__ __forceinline__ bool is_newest(const Params& p, int row, int place, int length, int reach) {
    if (!GATHER) return place == length - 1;
    return place < length && entry_of(p, row, place) == (reach - 1) / max(GATHER, 1);
}

// A score as an integer of the same order; 0 where there is none (-inf, NaN); the two zeros are one.
__device__ __forceinline__ u32 key_of(float score) {
    if (!(score > -__uint_as_float(0x7F800000u))) return 0;
    u32 bits = score == 0.f ? 0 : __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

struct Shared {
    u32* keys;       // [PLACES]
    int* counts;     // [BINS]: of bins, then of what lies before each warp's places
    u32* few;        // [THREADS]: keys of one bin
    int* sums;       // [WARPS]
    u32* found;      // [WARPS, 2]
};

// The bin of the `need`-th counted key from above; `need` becomes its rank among the bin's.
__device__ __forceinline__ u32 find_bin(const Shared& s, int& need) {
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const int first = s.counts[2 * t], second = s.counts[2 * t + 1];
    int above = first + second;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_sync(~0u, above, min(lane + by, 31));
        if (lane + by < 32) above += other;
    }
    if (lane == 0) s.sums[warp] = above;
    __syncthreads();
    above -= first + second;
#pragma unroll
    for (int w = 1; w < WARPS; w++)
        if (w > warp) above += s.sums[w];
    if (above < need && above + second >= need) s.found[0] = 2 * t + 1, s.found[1] = above;
    above += second;
    if (above < need && above + first >= need) s.found[0] = 2 * t, s.found[1] = above;
    __syncthreads();
    need -= (int)s.found[1];
    return s.found[0];
}

// Least and greatest of the block's values, and their number.
__device__ __forceinline__ void extent(const Shared& s, u32& low, u32& high, int& number) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        low = min(low, __shfl_xor_sync(~0u, low, by));
        high = max(high, __shfl_xor_sync(~0u, high, by));
        number += __shfl_xor_sync(~0u, number, by);
    }
    __syncthreads();
    if (lane == 0) s.found[2 * warp] = low, s.found[2 * warp + 1] = high, s.sums[warp] = number;
    __syncthreads();
    number = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        low = min(low, s.found[2 * w]), high = max(high, s.found[2 * w + 1]);
        number += s.sums[w];
    }
    __syncthreads();
}

__device__ __forceinline__ void empty_bins(const Shared& s) {
    s.counts[2 * threadIdx.x] = s.counts[2 * threadIdx.x + 1] = 0;
    __syncthreads();
}

// The least key taken; `need` becomes how many of those equal to it are taken, 0: all. low, high: of those
// that are no infinity.
__device__ __forceinline__ u32 threshold(const Shared& s, int length, u32 low, u32 high, int& need) {
    const int t = threadIdx.x;
    if (low > high) low = high = INFINITE;
    // Scores spread over the bins as they are (their integers would crowd); infinity lies on top.
    const float least = score_of(low), most = score_of(high);
    const float per = high > low && most - least < 3e38f ? (BINS - 2) / (most - least) : 0.f;
    auto bin_of = [&](u32 key) { return (u32)fminf((score_of(key) - least) * per, BINS - 1.f); };
    bool left = per > 0.f;
    if (left) {
        empty_bins(s);
        for (int place = t; place < length; place += THREADS)
            if (u32 key = s.keys[place]) atomicAdd(s.counts + bin_of(key), 1);
        __syncthreads();
        const u32 bin = find_bin(s, need);
        const int number = s.counts[bin];
        __syncthreads();
        if (t == 0) s.sums[0] = 0;
        __syncthreads();
        u32 of_bin_low = ~0u, of_bin_high = 0;
        int seen = 0;
        for (int place = t; place < length; place += THREADS) {
            u32 key = s.keys[place];
            if (key == 0 || bin_of(key) != bin) continue;
            if (number <= THREADS) s.few[atomicAdd(s.sums, 1)] = key;
            of_bin_low = min(of_bin_low, key), of_bin_high = max(of_bin_high, key), seen++;
        }
        __syncthreads();
        if (number <= THREADS) {
            if (t < number) {
                const u32 key = s.few[t];
                int above = 0, equal = 0;
#pragma unroll 8
                for (int i = 0; i < number; i++) above += s.few[i] > key, equal += s.few[i] == key;
                if (above < need && above + equal >= need) {   // equal keys write the same
                    s.found[0] = key;
                    s.found[1] = above + equal == need ? 0 : need - above;
                }
            }
            __syncthreads();
            need = (int)s.found[1];
            return s.found[0];
        }
        extent(s, of_bin_low, of_bin_high, seen);
        low = of_bin_low, high = of_bin_high;
    } else
        high = INFINITE;
    for (;;) {
        const u32 range = high - low;
        int shift = 0;
        while (range >> shift >= BINS) shift++;
        __syncthreads();
        empty_bins(s);
        for (int place = t; place < length; place += THREADS) {
            u32 key = s.keys[place];
            if (key >= low && key <= high) atomicAdd(s.counts + ((key - low) >> shift), 1);
        }
        __syncthreads();
        const u32 bin = find_bin(s, need);
        low += bin << shift;
        high = min(high, low + (1u << shift) - 1);
        if (s.counts[bin] == need) {
            need = 0;
            return low;
        }
        if (shift == 0) return low;
    }
}

// How many keys are `wanted`; counts becomes how many lie before each warp's places.
template <class Wanted>
__device__ __forceinline__ int count_before(const Shared& s, int turns, Wanted wanted) {
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    __syncthreads();
    for (int j = 0; j < turns; j++) {
        int number = __popc(__ballot_sync(~0u, wanted(s.keys[j * THREADS + t])));
        if (lane == 0) s.counts[j * WARPS + warp] = number;
    }
    __syncthreads();
    const bool here = 2 * t < turns * WARPS;
    const int first = here ? s.counts[2 * t] : 0, own = here ? first + s.counts[2 * t + 1] : 0;
    int sum = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_sync(~0u, sum, max(lane - by, 0));
        if (lane >= by) sum += other;
    }
    if (lane == 31) s.sums[warp] = sum;
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += s.sums[w];
        total += s.sums[w];
    }
    if (here) s.counts[2 * t] = before + sum - own, s.counts[2 * t + 1] = before + sum - own + first;
    __syncthreads();
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) select_kernel(const __grid_constant__ Params p) {
    Shared s;
    s.keys = (u32*)raw;
    s.counts = (int*)(s.keys + PLACES);
    s.few = (u32*)(s.counts + BINS);
    s.sums = (int*)(s.few + THREADS);
    s.found = (u32*)(s.sums + WARPS);
    const int row = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32;
    launch_dependents();   // what follows may start to wait
    dependency_wait();
    const int reach = p.reach[row], base = p.base[row];
    const int most = GATHER ? p.keep * p.block : p.capacity;
    const int length = min(most, (p.length[row] * p.mul + p.div - 1) / p.div);
    int* entries = p.entries + (long long)row * p.picks;
    int* address = p.address + (long long)row * p.picks;
    if (reach <= p.skip) {
        const int each = max(GATHER, 1);
        int total = min(p.blocks ? (reach + each - 1) / each : length, p.picks);
        if (t == 0) p.counts[row] = total;
        for (int k = t; k < p.picks; k += THREADS) {
            entries[k] = k < total ? k : -1;
            address[k] = k < total ? k + base : -1;
        }
        return;
    }
    const int turns = (length + THREADS - 1) / THREADS;
    u32 low = ~0u, high = 0;
    int valid = 0;
    for (int j = 0; j < turns; j += BATCH) {
        float found[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int place = (j + i) * THREADS + t;
            found[i] = place < length ? score_at(p, row, place, reach) : -__uint_as_float(0x7F800000u);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (j + i >= turns) continue;
            u32 key = key_of(found[i]);
            if (p.newest && is_newest(p, row, (j + i) * THREADS + t, length, reach)) key = INFINITE;
            s.keys[(j + i) * THREADS + t] = key;
            if (key) valid++;
            if (key && key < INFINITE) low = min(low, key), high = max(high, key);
        }
    }
    extent(s, low, high, valid);
    int need = p.picks;
    u32 least = 1;
    if (valid <= p.picks)
        need = 0;
    else
        least = threshold(s, length, low, high, need);
    const u32 lanes_before = (1u << lane) - 1;
    if (need > 0) {
        auto equal = [least](u32 key) { return key == least; };
        count_before(s, turns, equal);
        for (int j = 0; j < turns; j++) {
            u32& key = s.keys[j * THREADS + t];
            int rank = s.counts[j * WARPS + warp] + __popc(__ballot_sync(~0u, equal(key)) & lanes_before);
            if (equal(key) && rank >= need) key = 0;
        }
    }
    auto best = [least](u32 key) { return key >= least; };
    const int total = count_before(s, turns, best);
    for (int j = 0; j < turns; j++) {
        const u32 key = s.keys[j * THREADS + t];
        const int rank = s.counts[j * WARPS + warp] + __popc(__ballot_sync(~0u, best(key)) & lanes_before);
        if (best(key)) {
            const int entry = entry_of(p, row, j * THREADS + t);
            entries[rank] = entry, address[rank] = entry + base;
        }
    }
    if (t == 0) p.counts[row] = total;
    for (int k = total + t; k < p.picks; k += THREADS) entries[k] = address[k] = -1;
}
