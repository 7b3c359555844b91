// Chunks of sparse attention -> head outputs, turned back, sm_90: the combine kernel of
// kernels.attention. A block has one head of one row, a thread four channels; everything is asked for
// at once, so it waits for memory a single time.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   C  channels   PAIRS that turn, the last ones   CHUNKS of a row   WINDOW  of them of the window,
//   whose parts hold channels in turn; those of the others hold even ones before odd ones
//
// Letters: R rows, H heads.

#include "machine.cuh"

constexpr int THREADS = C / 4;

struct Params {
    const float* part;      // [R, CHUNKS, H, C]
    const float* top;       // [R, CHUNKS, H]
    const float* total;
    const float* sink;      // [H]
    const float* cosines;   // [R, PAIRS]
    const float* sines;
    u16* out;               // bf16 [R, H, C]
};

extern "C" __global__ void __launch_bounds__(THREADS) combine_kernel(const __grid_constant__ Params p) {
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x, j = threadIdx.x;
    const int channel = 4 * j, pair = row * PAIRS + (channel - (C - 2 * PAIRS)) / 2;
    const bool turns = channel >= C - 2 * PAIRS;
    dependency_wait();
    launch_dependents();
    float top[CHUNKS], own[CHUNKS], cosine[2] = {}, sine[2] = {};
    float4 part[CHUNKS];
    const float sink = p.sink[head];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int at = (row * CHUNKS + c) * heads + head;
        const float* from = p.part + (long long)at * C;
        top[c] = load_here(p.top + at), own[c] = load_here(p.total + at);
        if (c < WINDOW) {
            part[c] = load_here((const float4*)(from + 4 * j));
        } else {
            const float2 even = load_here((const float2*)(from + 2 * j));
            const float2 odd = load_here((const float2*)(from + C / 2 + 2 * j));
            part[c] = {even.x, odd.x, even.y, odd.y};
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (turns) cosine[i] = p.cosines[pair + i], sine[i] = p.sines[pair + i];

    float highest = sink;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) highest = fmaxf(highest, top[c]);
    float total = __expf(sink - highest), sum[4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const float share = __expf(top[c] - highest);
        total = fmaf(share, own[c], total);
        if (own[c] > 0.f) {   // nobody wrote where no key was
            sum[0] = fmaf(share, part[c].x, sum[0]), sum[1] = fmaf(share, part[c].y, sum[1]);
            sum[2] = fmaf(share, part[c].z, sum[2]), sum[3] = fmaf(share, part[c].w, sum[3]);
        }
    }
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        words[i] = pack_bf16(divide(sum[2 * i], total), divide(sum[2 * i + 1], total));
        const float even = bf16_value(words[i] & 0xFFFF), odd = bf16_value(words[i] >> 16);
        // Turning back is turning (odd, even).
        if (turns) words[i] = pack_bf16(even * cosine[i] + odd * sine[i], odd * cosine[i] - even * sine[i]);
    }
    *(uint2*)(p.out + ((long long)row * heads + head) * C + channel) = make_uint2(words[0], words[1]);
}
