// From one sublayer to the next, sm_90: expand, collapse, norm and quantise one row by a cluster of
// CL blocks, each with its part of the channels (kernels.mhc.boundary's usual case).
//
// A thread has VALUES channels of all streams, so every load is asked for at once; blocks exchange
// one number, the sum of squares of their channels, added in rank order.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   S  residual streams   K  picks of a row, 0: y as it stands   CL  blocks of a cluster
//   SHARED_BYTES of dynamic shared memory
//
// Letters: R rows, D hidden.

#include "machine.cuh"

constexpr int VALUES = 4, GROUP = 32 / VALUES;   // channels of a thread, threads of a group
constexpr int MOST_WARPS = 32;

struct Params {
    const u16* y;         // bf16 [R, D], or picks [R, K, D]
    const u16* shared;    // bf16 [R, D], with picks
    const u16* x;         // bf16 [R, S, D]
    const float* coef;    // [R, (2 + S) S]
    const float* norm;    // [D]
    u16* out;             // bf16 [R, S, D]
    u16* u;               // bf16 [R, D]
    u8* codes;            // [R, D]
    float* scales;        // [D / 32, R]
    int hidden, rows;
    float eps;
};

struct Four { float v[VALUES]; };

__device__ __forceinline__ Four four_of(uint2 bits) {
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
            __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u)};
}
__device__ __forceinline__ uint2 bits_of(const Four& f) {
    return make_uint2(pack_bf16(f.v[0], f.v[1]), pack_bf16(f.v[2], f.v[3]));
}

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
    if (inside) norm = *(const float4*)(p.norm + d);
    launch_dependents();   // what follows may start to wait
    dependency_wait();

    // Everything is asked for before anything is used.
    constexpr int PARTS = K > 0 ? K + 1 : 1;
    uint2 parts[PARTS] = {}, streams[S] = {};
    float coef[(2 + S) * S];
    if (inside) {
#pragma unroll
        for (int k = 0; k < (K > 0 ? K : 1); k++)
            parts[k] = *(const uint2*)(p.y + (wide * (K > 0 ? K : 1) + k) * p.hidden + d);
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
        y = four_of(bits_of(y));
    }
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
