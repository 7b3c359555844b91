// The K best scores of a row, ascending by place, sm_90: one block a row (kernels.index.select_top).
//
// Scores become integers in their order. Histograms of the range that is left (2,048 bins, at most
// three rounds) find the K-th best; equal ones are taken from the front. Integer counts alone decide,
// so the result is exact and the same as any other correct selection's.
// Up to PER * THREADS scores are read once and stay in registers; more are read again each round.
//
// Built once (deepdraft/kernels/native/build.py). SHARED_BYTES of dynamic shared memory.

typedef unsigned int u32;
typedef unsigned char u8;

constexpr int THREADS = 1024, WARPS = 32, PER = 20, SPAN = PER * THREADS, BINS = 2 * THREADS;

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
};

#ifndef EMULATED
__device__ __forceinline__ void dependency_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
extern __shared__ __align__(128) u8 raw[];
#endif

// 0 where there is no score (-inf, NaN); the two zeros are one.
__device__ __forceinline__ u32 key_of(float score) {
    if (!(score > -__uint_as_float(0x7F800000u))) return 0;
    u32 bits = score == 0.f ? 0 : __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ void load_keys(u32 (&keys)[PER], const float* scores, int begin, int length) {
    float found[PER];
#pragma unroll
    for (int j = 0; j < PER; j++) {
        int place = begin + j * THREADS + threadIdx.x;
        found[j] = place < length ? scores[place] : -__uint_as_float(0x7F800000u);
    }
#pragma unroll
    for (int j = 0; j < PER; j++) keys[j] = key_of(found[j]);
}

// How many keys `wanted` there are; counts [PER, WARPS] becomes how many lie before each warp's.
template <class Wanted>
__device__ __forceinline__ int count_before(const u32 (&keys)[PER], int* counts, int* sums, Wanted wanted) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PER; j++) {
        int number = __popc(__ballot_sync(~0u, wanted(keys[j])));
        if (lane == 0) counts[j * WARPS + warp] = number;
    }
    __syncthreads();
    int own = threadIdx.x < PER * WARPS ? counts[threadIdx.x] : 0, sum = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_sync(~0u, sum, max(lane - by, 0));
        if (lane >= by) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < PER; w++) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    if (threadIdx.x < PER * WARPS) counts[threadIdx.x] = before + sum - own;
    __syncthreads();
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) select_kernel(const __grid_constant__ Params p) {
    int* histogram = (int*)raw;              // [BINS]; later counts of ranks
    int* sums = histogram + BINS;            // [WARPS]
    u32* found = (u32*)(sums + WARPS);       // [WARPS, 2]
    const int row = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32;
    launch_dependents();
    dependency_wait();
    const int reach = p.reach[row], base = p.base[row];
    const int length = min(p.capacity, (p.length[row] * p.mul + p.div - 1) / p.div);
    int* entries = p.entries + (long long)row * p.picks;
    int* address = p.address + (long long)row * p.picks;
    if (reach <= p.skip) {
        int total = min(p.blocks ? reach : length, p.picks);
        if (t == 0) p.counts[row] = total;
        for (int k = t; k < p.picks; k += THREADS) {
            entries[k] = k < total ? k : -1;
            address[k] = k < total ? k + base : -1;
        }
        return;
    }
    const float* scores = p.scores + (long long)row * p.capacity;
    const bool once = length <= SPAN;
    u32 keys[PER];
    load_keys(keys, scores, 0, length);

    // Least and greatest key, and how many there are.
    u32 low = ~0u, high = 0;
    int valid = 0;
    for (int begin = 0; begin < length; begin += SPAN) {
        if (begin) load_keys(keys, scores, begin, length);
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (keys[j]) low = min(low, keys[j]), high = max(high, keys[j]), valid++;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        low = min(low, __shfl_xor_sync(~0u, low, by));
        high = max(high, __shfl_xor_sync(~0u, high, by));
        valid += __shfl_xor_sync(~0u, valid, by);
    }
    if (lane == 0) found[2 * warp] = low, found[2 * warp + 1] = high, sums[warp] = valid;
    __syncthreads();
    valid = 0;
    for (int w = 0; w < WARPS; w++)
        low = min(low, found[2 * w]), high = max(high, found[2 * w + 1]), valid += sums[w];

    // Which keys are taken: those from `low` on, or those above it and the first `need` equal ones.
    int need = p.picks;
    bool ties = false;
    if (valid <= p.picks) {
        low = 1;
    } else {
        for (;;) {
            u32 range = high - low;
            int shift = 0;
            while (range >> shift >= BINS) shift++;
            __syncthreads();
            histogram[2 * t] = histogram[2 * t + 1] = 0;
            __syncthreads();
            for (int begin = 0; begin < length; begin += SPAN) {
                if (!once) load_keys(keys, scores, begin, length);
#pragma unroll
                for (int j = 0; j < PER; j++)
                    if (keys[j] >= low && keys[j] <= high) atomicAdd(histogram + ((keys[j] - low) >> shift), 1);
            }
            __syncthreads();
            // Keys in bins above this thread's two.
            int first = histogram[2 * t], second = histogram[2 * t + 1], above = first + second;
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                int other = __shfl_sync(~0u, above, min(lane + by, 31));
                if (lane + by < 32) above += other;
            }
            if (lane == 0) sums[warp] = above;
            __syncthreads();
            above -= first + second;
            for (int w = warp + 1; w < WARPS; w++) above += sums[w];
            if (above < need && above + second >= need) found[0] = 2 * t + 1, found[1] = above;
            above += second;
            if (above < need && above + first >= need) found[0] = 2 * t, found[1] = above;
            __syncthreads();
            u32 bin = found[0];
            need -= (int)found[1];
            low += bin << shift;
            high = min(high, low + (1u << shift) - 1);
            if (histogram[bin] == need) break;
            if (shift == 0) {
                ties = true;
                break;
            }
        }
    }

    int total = 0, equal_before = 0;
    for (int begin = 0; begin < length; begin += SPAN) {
        if (!once) load_keys(keys, scores, begin, length);
        const u32 lanes_before = (1u << lane) - 1;
        if (ties) {
            auto equal = [low](u32 key) { return key == low; };
            int number = count_before(keys, histogram, sums, equal);
#pragma unroll
            for (int j = 0; j < PER; j++) {
                int rank = histogram[j * WARPS + warp];
                rank += __popc(__ballot_sync(~0u, equal(keys[j])) & lanes_before);
                if (equal(keys[j]) && equal_before + rank >= need) keys[j] = 0;
            }
            equal_before += number;
        }
        auto best = [low](u32 key) { return key >= low; };
        int taken = count_before(keys, histogram, sums, best);
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int rank = histogram[j * WARPS + warp];
            rank += __popc(__ballot_sync(~0u, best(keys[j])) & lanes_before);
            if (best(keys[j])) {
                int entry = begin + j * THREADS + t, k = total + rank;
                if (p.blocks)
                    entry = p.blocks[(long long)row * p.keep + entry / p.block] * p.block + entry % p.block;
                entries[k] = entry, address[k] = entry + base;
            }
        }
        total += taken;
    }
    if (t == 0) p.counts[row] = total;
    for (int k = total + t; k < p.picks; k += THREADS) entries[k] = address[k] = -1;
}
