// From one sublayer to the next, sm_90: expand, collapse, norm and quantise one row by a cluster of
// CL blocks, each with its part of the channels (kernels.mhc.boundary's usual case).
//
// A thread has VALUES channels of all streams, so every load is asked for at once; blocks exchange
// one number, the sum of squares of their channels, added in rank order.
//
// Of several ranks each has a part of y. A thread writes its channels into the other ranks' mailboxes
// and waits for theirs (the words and rules of kernels.one_shot): 16 bytes at a time, a warp's side by
// side. A row at position -1 is not exchanged, but row 0 always is: an exchange that nobody waits for
// would let a rank run ahead and overwrite what another has not read.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   S  residual streams   K  picks of a row, 0: y as it stands   CL  blocks of a cluster
//   RANKS  that have parts of y, without it 1   RANK  this one
//   SHARED_BYTES of dynamic shared memory
//
// Letters: R rows, D hidden.

#include "machine.cuh"

constexpr int VALUES = 4, GROUP = 32 / VALUES;   // channels of a thread, threads of a group
constexpr int MOST_WARPS = 32;
#ifndef RANKS
#define RANKS 1
#define RANK 0
#endif

struct Params {
    const void* y;        // bf16 [R, D] (a part: float [R, D]), or picks bf16 [R, K, D]
    const u16* shared;    // bf16 [R, D], with picks
    const u16* x;         // bf16 [R, S, D]
    const float* coef;    // [R, (2 + S) S]
    const float* norm;    // [D], or none: the streams are all that is wanted
    u16* out;             // bf16 [R, S, D]
    u16* u;               // bf16 [R, D]
    u8* codes;            // [R, D]
    float* scales;        // [D / 32, R]
    int hidden, rows;
    float eps;
#if RANKS > 1
    u64* boxes[RANKS];    // mailboxes [2, RANKS, capacity]
    const int* count;     // of exchanges in earlier steps
    int* error;
    const int* positions; // [R], or none
    int slot, capacity, limit;
#endif
};

struct Four { float v[VALUES]; };

__device__ __forceinline__ Four four_of(uint2 bits) {
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
            __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u)};
}
__device__ __forceinline__ uint2 bits_of(const Four& f) {
    return make_uint2(pack_bf16(f.v[0], f.v[1]), pack_bf16(f.v[2], f.v[3]));
}

#if RANKS > 1
// This rank's part of four channels -> the sum over the ranks, in their order. `at`: a place in a
// mailbox for two words, `stride` behind it one for the other two.
__device__ __forceinline__ Four sum_of_ranks(const Params& p, const Four& own, int tag, int at, int stride, bool counts, int error) {
    const int side = (tag & 1) * RANKS;
    u64 words[VALUES];
    bool fine = true;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const u32 bits = __float_as_uint(own.v[i]);
        words[i] = (u64)(u32)tag << 32 | bits;
        fine &= (bits & 0x7F800000u) != 0x7F800000u;
    }
#pragma unroll
    for (int step = 1; step < RANKS; step++) {
        u64* to = p.boxes[(RANK + step) % RANKS] + (long long)(side + RANK) * p.capacity + at;
        put_words(to, words[0], words[1]);
        put_words(to + stride, words[2], words[3]);
    }
    if (!fine && counts) atomicCAS(p.error, 0, 256 + RANK);
    Four sum = {};
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
        Four part = own;
        if (from != RANK) {
            const u64* box = p.boxes[RANK] + (long long)(side + from) * p.capacity + at;
            bool come = false;
            for (int spins = error == 0 ? p.limit : 0; !come && spins >= 0; spins--) {
                get_words(box, words[0], words[1]);
                get_words(box + stride, words[2], words[3]);
                come = true;
#pragma unroll
                for (int i = 0; i < VALUES; i++) come &= (int)(words[i] >> 32) == tag;
            }
            if (!come) atomicCAS(p.error, 0, 1 + from);
            bool finite = true;
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                part.v[i] = __uint_as_float(come ? (u32)words[i] : 0x7FC00000u);
                finite &= ((u32)words[i] & 0x7F800000u) != 0x7F800000u;
            }
            if (come && !finite && counts) atomicCAS(p.error, 0, 256 + from);
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum.v[i] = from == 0 ? part.v[i] : sum.v[i] + part.v[i];
    }
    return sum;
}
#endif

#ifndef CLUSTER
#define CLUSTER __cluster_dims__(CL, 1, 1)
#endif
extern "C" __global__ void CLUSTER boundary_kernel(const __grid_constant__ Params p) {
    float* warp_sums = (float*)raw;
    float* block_sums = warp_sums + MOST_WARPS;   // [CL], written by the cluster's blocks
    const int row = blockIdx.y, each = p.hidden / CL;
    const int d = blockIdx.x * each + threadIdx.x * VALUES;
    const bool inside = threadIdx.x * VALUES < each;
    const long long wide = row;
#if CL > 1
    cluster_arrive();   // whoever writes into another block's memory waits until that block runs
#endif
    float4 norm = {};
    if (inside && p.norm) norm = *(const float4*)(p.norm + d);
    launch_dependents();   // what follows may start to wait
    dependency_wait();

    // Everything is asked for before anything is used.
    constexpr int PARTS = K > 0 ? K + 1 : 1;
    uint2 parts[PARTS] = {}, streams[S] = {};
    float coef[(2 + S) * S];
#if RANKS > 1
    float4 part = {};
    if (K == 0 && inside) part = *(const float4*)((const float*)p.y + wide * p.hidden + d);
    const int tag = *p.count + p.slot + 1, error = *p.error;
    const bool counts = p.positions == nullptr || p.positions[row] >= 0;
#endif
    if (inside) {
#pragma unroll
        for (int k = 0; k < (K > 0 ? K : RANKS == 1); k++)
            parts[k] = *(const uint2*)((const u16*)p.y + (wide * (K > 0 ? K : 1) + k) * p.hidden + d);
        if (K > 0) parts[PARTS - 1] = *(const uint2*)(p.shared + wide * p.hidden + d);
#pragma unroll
        for (int a = 0; a < S; a++)
            streams[a] = *(const uint2*)(p.x + (wide * S + a) * p.hidden + d);
    }
#pragma unroll
    for (int i = 0; i < (2 + S) * S; i++) coef[i] = p.coef[row * (2 + S) * S + i];

    Four y = four_of(parts[0]);
    if (K > 0) {
#pragma unroll
        for (int k = 1; k < PARTS; k++) {
            Four more = four_of(parts[k]);
#pragma unroll
            for (int i = 0; i < VALUES; i++) y.v[i] += more.v[i];
        }
    }
#if RANKS > 1
    if (K == 0) y = {part.x, part.y, part.z, part.w};
    if (inside && (counts || row == 0))
        y = sum_of_ranks(p, y, tag, (int)wide * p.hidden + blockIdx.x * each + threadIdx.x * 2, each / 2, counts, error);
#endif
    if (K > 0 || RANKS > 1) y = four_of(bits_of(y));
    Four x[S], h = {};
#pragma unroll
    for (int a = 0; a < S; a++) x[a] = four_of(streams[a]);
#pragma unroll
    for (int b = 0; b < S; b++) {
        Four to;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            // The order in which the Triton kernel's products and sums are fused.
            to.v[i] = fmaf(coef[S + b], y.v[i], coef[2 * S + b] * x[0].v[i]);
#pragma unroll
            for (int a = 1; a < S; a++) to.v[i] = fmaf(coef[2 * S + a * S + b], x[a].v[i], to.v[i]);
        }
        uint2 bits = bits_of(to);
        to = four_of(bits);
        if (inside) *(uint2*)(p.out + (wide * S + b) * p.hidden + d) = bits;
#pragma unroll
        for (int i = 0; i < VALUES; i++) h.v[i] = fmaf(coef[b], to.v[i], h.v[i]);
    }
    if (p.norm == nullptr) return;
    h = four_of(bits_of(h));

    // Squares: lanes, warps, blocks, in this order.
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) square = fmaf(h.v[i], h.v[i], square);
    if (!inside) square = 0.f;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) square += __shfl_xor_sync(~0u, square, by);
    const int warp = threadIdx.x / 32, warps = (each / VALUES + 31) / 32;
    if (threadIdx.x % 32 == 0) warp_sums[warp] = square;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < warps; i++) total += warp_sums[i];
#if CL > 1
    cluster_wait();
    if (threadIdx.x < CL) store_there(block_sums + cluster_rank(), threadIdx.x, total);
    cluster_arrive();
    cluster_wait();
    total = 0.f;
#pragma unroll
    for (int i = 0; i < CL; i++) total += block_sums[i];
#endif
    const float inverse = rsqrtf(divide(total, (float)p.hidden) + p.eps);
    const float weight[VALUES] = {norm.x, norm.y, norm.z, norm.w};
    Four u;
#pragma unroll
    for (int i = 0; i < VALUES; i++) u.v[i] = h.v[i] * inverse * weight[i];
    uint2 bits = bits_of(u);
    u = four_of(bits);
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) most = fmaxf(most, fabsf(u.v[i]));
#pragma unroll
    for (int by = GROUP / 2; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    // The power of two at which the largest magnitude (at least 1e-4) is at most 448.
    u32 power = (max(__float_as_uint(most), 0x38D1B717u) + 0x1FFFFFu - (8u << 23)) & 0x7F800000u;
    float by = __uint_as_float((254u << 23) - power);
    if (inside) {
        *(uint2*)(p.u + wide * p.hidden + d) = bits;
        *(u32*)(p.codes + wide * p.hidden + d) =
            e4m3_codes(u.v[0] * by, u.v[1] * by, u.v[2] * by, u.v[3] * by);
        if (threadIdx.x % GROUP == 0)
            p.scales[(long long)(d / 32) * p.rows + row] = __uint_as_float(power);
    }
}
