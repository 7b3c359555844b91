// What becomes of a unit's sums: parts from memory, SwiGLU, rounding, quantisation, storing. Part of
// stream.cu, whose macros and parameters it uses.

// sum[tile][..]: weight rows 4 g + 2 tile (+ 1), batch rows 2 t (+ 1).
__device__ __forceinline__ void store_four(const Params& p, u64 at, float a, float b, float c, float d) {
    if (OUT == 1) *(float4*)((float*)p.y + at) = make_float4(a, b, c, d);
    else *(uint2*)((u16*)p.y + at) = make_uint2(pack_bf16(a, b), pack_bf16(c, d));
}

// The same four, and those of the other seven threads of a group of 32, as FP8.
__device__ __forceinline__ void store_quantised(const Params& p, u64 row, int unit, int g, float a, float b, float c, float d) {
    a = round_bf16(a), b = round_bf16(b), c = round_bf16(c), d = round_bf16(d);
    float most = fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d)));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const u32 bits = scale_bits(most);
    const float inverse = inverse_of(bits);
    *(u32*)((u8*)p.y + row * p.units * 32 + unit * 32 + 4 * g) = e4m3_codes(a * inverse, b * inverse, c * inverse, d * inverse);
    if (g == 0) p.ys[(u64)unit * p.rows + row] = __uint_as_float(bits);
}

__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
    gate = fminf(round_bf16(gate), limit);
    up = fminf(fmaxf(round_bf16(up), -limit), limit);
    return __fdividef(gate, 1.f + __expf(-gate)) * up * weight;
}

// Picks of rows 2 t and 2 t + 1 that an expert works for, -1 where there is none, and their weights.
struct Picks {
    int of[2];
    float weight[2];
};
__device__ __forceinline__ Picks load_picks(const Params& p, const int (*slots)[8], int row_tile, int outer, int t) {
    Picks k = {};
    if (!FP4) return k;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int row = row_tile * 8 + 2 * t + n;
        const int slot = slots[outer][2 * t + n];
        k.of[n] = slot < 0 ? -1 : row * p.picks + slot;
        k.weight[n] = UP && slot >= 0 ? p.weights[k.of[n]] : 0.f;
    }
    return k;
}

// A unit's sums are whole (of one part of the columns where SPLIT > 1).
__device__ __forceinline__ void finish(const Params& p, float (&sum)[2][4], int row_tile, int unit, int part, const Picks& picks, int lane) {
    int g = lane >> 2, t = lane & 3;
    if (SPLIT > 1 && !JOINED) {
        int counter = row_tile * p.units + unit;
        float4* own = (float4*)(p.part + ((u64)counter * SPLIT + part) * 256) + lane;
        __stcg(own, make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]));
        __stcg(own + 32, make_float4(sum[1][0], sum[1][1], sum[1][2], sum[1][3]));
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane == 0) before = atomicAdd(p.arrive + counter, 1);
        before = __shfl_sync(~0u, before, 0);
        if (before != SPLIT - 1) return;
        __threadfence();
        const float4* parts = (const float4*)(p.part + (u64)counter * SPLIT * 256) + lane;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float4 v[SPLIT];
#pragma unroll
            for (int s = 0; s < SPLIT; s++) v[s] = __ldcg(parts + s * 64 + i * 32);
            sum[i][0] = v[0].x, sum[i][1] = v[0].y, sum[i][2] = v[0].z, sum[i][3] = v[0].w;
#pragma unroll
            for (int s = 1; s < SPLIT; s++)
                sum[i][0] += v[s].x, sum[i][1] += v[s].y, sum[i][2] += v[s].z, sum[i][3] += v[s].w;
        }
        if (lane == 0) p.arrive[counter] = 0;
    }
    if (!FP4) {
        if (OUT == 2) {
            store_quantised(p, row_tile * 8 + 2 * t, unit, g, sum[0][0], sum[0][2], sum[1][0], sum[1][2]);
            store_quantised(p, row_tile * 8 + 2 * t + 1, unit, g, sum[0][1], sum[0][3], sum[1][1], sum[1][3]);
            return;
        }
        u64 row = row_tile * 8 + 2 * t, width = (u64)p.units * 32, at = row * width + unit * 32 + 4 * g;
        store_four(p, at, sum[0][0], sum[0][2], sum[1][0], sum[1][2]);
        store_four(p, at + width, sum[0][1], sum[0][3], sum[1][1], sum[1][3]);
        return;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        if (picks.of[n] < 0) continue;
        const u64 pick = picks.of[n];
        if (UP) {  // tile 0 is the gate, tile 1 the up map, of channels 16 unit + 2 g (+ 1)
            float a = swiglu(sum[0][n], sum[1][n], picks.weight[n], p.limit);
            float b = swiglu(sum[0][n + 2], sum[1][n + 2], picks.weight[n], p.limit);
            *(u32*)((u16*)p.y + pick * p.units * 16 + unit * 16 + 2 * g) = pack_bf16(a, b);
        } else {
            u64 at = pick * p.units * 32 + unit * 32 + 4 * g;
            *(uint2*)((u16*)p.y + at) = make_uint2(pack_bf16(sum[0][n], sum[0][n + 2]), pack_bf16(sum[1][n], sum[1][n + 2]));
        }
    }
}
