// Sparse attention of many rows, sm_90 (kernels.prefill_attention.attend_rows): a window of the chunk and
// selected entries, all unpacked to bf16 before, 64 keys a turn with a running maximum, a sink per head.
//
// One block stays on each multiprocessor and takes rows in turn. A warp group fetches the keys of the next
// turn while two work: the turn's owner (they alternate) makes its scores and probabilities, then each adds
// up its half of the channels, even ones or odd ones. What a lane of the owner made (16 words of
// probabilities, a share, maximum and denominator of two heads) goes to the same lane of the other group.
// Keys lie in shared memory once, for scores as they are and for sums turned by the matrix unit.
//
// Letters: R rows, H heads, C channels, K places of a list, W window places.

#include "machine.cuh"
#include "groups.cuh"

constexpr int WORKERS = 256, THREADS = 384, HEADS = 64, CHANNELS = 512, KEYS = 64, PAIRS = 32;
constexpr int PANEL = 8192, TILE = 8 * PANEL;   // [64, 64] bf16; [64, C]
constexpr int SLOT = 22;                        // words of a lane

struct Params {
    const u16* q;           // bf16 [R, q_stride]: H heads, not turned yet
    const float* cos;       // [R, PAIRS]
    const float* sin;
    const u16* window;      // bf16 [>= R + W - 1, C], even channels before odd ones
    const int* first;       // [R]: row r sees rows r + first[r] .. r + W - 1 of it
    const u16* main;        // the same of entries; row 0 is record first_main
    const int* list;        // [R, K] records, -1 in empty places, or null
    const int* counts;      // [R]: places before the empty ones, or null
    const float* sink;      // [H]
    u16* out;               // bf16 [R, H, C]
    int rows, q_stride, window_places, places, first_main;
    float scale;
};

struct Shared {
    u8 *q, *keys;           // [64, C] of the row's queries, then of its result; two tiles of keys
    u32* slots;             // [2, 4 warps, SLOT, 32]
    u16* valid;             // [2, 4]: 16 keys each
    u32 full, empty;        // barriers of two tiles each
};

__device__ __forceinline__ int turns_of(const Params& p, int row) {
    int chosen = p.list ? p.places : 0;
    if (p.list && p.counts) chosen = min(p.counts[row], chosen);
    return p.window_places / KEYS + (chosen + KEYS - 1) / KEYS;
}

// ---- keys ----------------------------------------------------------------------------------

__device__ __forceinline__ void fetch(const Params& p, const Shared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int tile = 0, phase = 1;   // of the barriers of empty tiles: at first they are
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int turns = turns_of(p, row), first = p.first[row];
        for (int turn = 0; turn < turns; turn++) {
            // Lane i knows where key i % 16 of this warp's is.
            const int key = 16 * warp + lane % 16, place = turn * KEYS + key - p.window_places;
            const u16* from = p.window;
            bool valid;
            if (place < 0) {
                valid = turn * KEYS + key >= first;
                if (valid) from += (long long)(row + turn * KEYS + key) * CHANNELS;
            } else {
                const int record = place < p.places ? p.list[(long long)row * p.places + place] : -1;
                valid = record >= 0;
                from = p.main;
                if (valid) from += (long long)(record - p.first_main) * CHANNELS;
            }
            const u32 mask = __ballot_sync(~0u, valid);
            barrier_wait(s.empty + 8 * tile, phase);
            if (lane == 0) s.valid[4 * tile + warp] = (u16)mask;
            const u32 to = shared_address(s.keys) + tile * TILE;
#pragma unroll 4
            for (int k = 0; k < 16; k++) {
                const int n = 16 * warp + k;
                const u8* source = (const u8*)__shfl_sync(~0u, (u64)from, k);
                const bool there = mask >> k & 1;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int part = lane + 32 * half;   // 8 channels
                    copy16_or_zero(to + part / 8 * PANEL + n * 128 + ((part % 8 ^ n % 8) << 4),
                                   source + 16 * part, there);
                }
            }
            commit();
            wait_copies<0>();
            reads_done();   // what was copied comes before what the products read, too
            barrier_arrive(s.full + 8 * tile);
            tile ^= 1, phase ^= tile == 0;
        }
    }
}

// ---- queries and results -------------------------------------------------------------------

__device__ __forceinline__ u32 pair_of(u32 a, u32 b, int half) { return __byte_perm(a, b, half ? 0x7632 : 0x5410); }

// Eight pairs of channels by a position's angles, from number `at` of the tables on, or BACK.
template <bool BACK>
__device__ __forceinline__ void rotate(u32 (&words)[8], const Params& p, int at) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float c = p.cos[at + i], n = p.sin[at + i];
        const float even = bf16_value(words[i] & 0xFFFF), odd = bf16_value(words[i] >> 16);
        words[i] = BACK ? pack_bf16(even * c + odd * n, odd * c - even * n)
                        : pack_bf16(even * c - odd * n, odd * c + even * n);
    }
}

// The row's queries, turned: [64, C] in panels, even channels before odd ones.
__device__ __forceinline__ void put_queries(const Params& p, const Shared& s, int row) {
    for (int task = threadIdx.x; task < HEADS * 32; task += WORKERS) {
        const int head = task / 32, part = task % 32;   // 16 channels
        const uint4* from = (const uint4*)(p.q + (long long)row * p.q_stride + head * CHANNELS + 16 * part);
        const uint4 low = from[0], high = from[1];
        u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (part >= 28) rotate<false>(words, p, row * PAIRS + 8 * (part - 28));
        u8* to = s.q + part / 8 * PANEL + head * 128 + ((part % 8 ^ head % 8) << 4);
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint4*)(to + half * 4 * PANEL) =
                make_uint4(pair_of(words[0], words[1], half), pair_of(words[2], words[3], half),
                           pair_of(words[4], words[5], half), pair_of(words[6], words[7], half));
    }
}

// The row's result, turned back, from where the queries were.
__device__ __forceinline__ void take_result(const Params& p, const Shared& s, int row) {
    for (int task = threadIdx.x; task < HEADS * 32; task += WORKERS) {
        const int head = task / 32, part = task % 32;
        const u8* from = s.q + part / 8 * PANEL + head * 128 + ((part % 8 ^ head % 8) << 4);
        const uint4 a = *(const uint4*)from, b = *(const uint4*)(from + 4 * PANEL);
        const u32 evens[4] = {a.x, a.y, a.z, a.w}, odds[4] = {b.x, b.y, b.z, b.w};
        u32 words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = pair_of(evens[i / 2], odds[i / 2], i % 2);
        if (part >= 28) rotate<true>(words, p, row * PAIRS + 8 * (part - 28));
        uint4* to = (uint4*)(p.out + ((long long)row * HEADS + head) * CHANNELS + 16 * part);
        to[0] = make_uint4(words[0], words[1], words[2], words[3]);
        to[1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
}

// ---- work ----------------------------------------------------------------------------------

struct State { float top[2], total[2], share[2]; };   // of heads g and g + 8 of a warp's 16

// Probabilities of a turn as rows of A, from its scores; the state after it.
__device__ __forceinline__ void probabilities(u32 (&a)[4][4], State& state, const float (&c)[32], u64 valid, float scale) {
    const int t = threadIdx.x % 4;
    const float none = -__uint_as_float(0x7F800000u);
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = valid >> (i / 4 * 8 + 2 * t + i % 2) & 1 ? c[i] * scale : none;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        float top = state.top[k], sum = 0.f;
#pragma unroll
        for (int i = 0; i < 16; i++) top = fmaxf(top, x[i / 2 * 4 + 2 * k + i % 2]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float& v = x[i / 2 * 4 + 2 * k + i % 2];
            v = __expf(v - top);
            sum += v;
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        state.share[k] = __expf(state.top[k] - top);
        state.total[k] = state.total[k] * state.share[k] + sum;
        state.top[k] = top;
    }
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* v = x + 4 * (2 * s + i / 2) + 2 * (i % 2);
            a[s][i] = pack_bf16(v[0], v[1]);
        }
}

__device__ __forceinline__ void work(const Params& p, const Shared& s) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32 % 4, group = t / 128, g = lane / 4;
    int tile = 0, phase = 0;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int turns = turns_of(p, row);
        put_queries(p, s, row);
        reads_done();   // stores come before what the products read, too
        groups_sync(1, WORKERS);
        State state = {{-1e30f, -1e30f}, {0.f, 0.f}, {1.f, 1.f}};
        float sums[4][32];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 32; j++) sums[i][j] = 0.f;
        for (int turn = 0; turn < turns; turn++) {
            const u32 keys = shared_address(s.keys) + tile * TILE;
            u32* slot = s.slots + (tile * 4 + warp) * SLOT * 32 + lane;
            u32 a[4][4];
            barrier_wait(s.full + 8 * tile, phase);
            if (tile == group) {
                float scores[32];
                const u32 q = shared_address(s.q);
                products_begin();
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    const u32 at = i / 4 * PANEL + i % 4 * 32;
                    multiply_shared(scores, matrix_of(q + at), matrix_of(keys + at), i > 0);
                }
                products_commit();
                products_wait();
                hold(scores);
                const u64 valid = *(const u64*)(s.valid + 4 * tile);
                probabilities(a, state, scores, valid, p.scale);
#pragma unroll
                for (int i = 0; i < 16; i++) slot[32 * i] = a[i / 4][i % 4];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    slot[32 * (16 + k)] = __float_as_uint(state.top[k]);
                    slot[32 * (18 + k)] = __float_as_uint(state.total[k]);
                    slot[32 * (20 + k)] = __float_as_uint(state.share[k]);
                }
                groups_arrive(2 + 4 * tile + warp, 64);
            } else {
                groups_sync(2 + 4 * tile + warp, 64);
#pragma unroll
                for (int i = 0; i < 16; i++) a[i / 4][i % 4] = slot[32 * i];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    state.top[k] = __uint_as_float(slot[32 * (16 + k)]);
                    state.total[k] = __uint_as_float(slot[32 * (18 + k)]);
                    state.share[k] = __uint_as_float(slot[32 * (20 + k)]);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 32; j++) sums[i][j] *= state.share[j / 2 % 2];
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++)
                multiply_turned(sums, a[k], turned_matrix_of(keys + 4 * group * PANEL + k * 2048));
            products_commit();
            products_wait();
#pragma unroll
            for (int i = 0; i < 4; i++) hold(sums[i]);
            if (lane == 0) barrier_arrive(s.empty + 8 * tile);
            tile ^= 1, phase ^= tile == 0;
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float sink = p.sink[16 * warp + g + 8 * k], top = fmaxf(state.top[k], sink);
            const float share = __expf(state.top[k] - top);
            state.share[k] = share / (state.total[k] * share + __expf(sink - top));
        }
        // The scores of both are done, so the queries are no longer read.
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const float* v = sums[i] + 4 * j + 2 * k;
                    const int head = 16 * warp + g + 8 * k;
                    u8* to = s.q + (4 * group + i) * PANEL + head * 128 + ((j ^ head % 8) << 4) + lane % 4 * 4;
                    *(u32*)to = pack_bf16(v[0] * state.share[k], v[1] * state.share[k]);
                }
        groups_sync(1, WORKERS);
        take_result(p, s, row);
        groups_sync(1, WORKERS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_rows_kernel(const __grid_constant__ Params p) {
    Shared s;
    s.q = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    s.keys = s.q + TILE;
    s.slots = (u32*)(s.keys + 2 * TILE);
    s.valid = (u16*)(s.slots + 2 * 4 * SLOT * 32);
    s.full = shared_address(s.valid + 8), s.empty = s.full + 16;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) barrier_init(s.full + 8 * i, 128), barrier_init(s.empty + 8 * i, 8);
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        registers_less<40>();
        fetch(p, s);
    } else {
        registers_more<232>();
        work(p, s);
    }
}
