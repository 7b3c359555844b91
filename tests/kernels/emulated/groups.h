// Products of warp groups on a CPU: a warp's 16 rows of A in registers, B read from shared memory where
// its words say, parts of 16 bytes turned as address bits 7 to 9 tell.
#pragma once
#include "cuda.h"

inline u32 times_bf16(u32 a, u32 b) {
    return pack_bf16(bf16_of(a & 0xFFFF) * bf16_of(b & 0xFFFF), bf16_of(a >> 16) * bf16_of(b >> 16));
}
inline void products_begin() {}
inline void products_commit() {}
inline void products_wait() {}
inline void hold(float (&)[32]) {}
static void multiply_group(float (&c)[32], const u32 (&a)[4], u64 b, bool add) {
    if (b >> 62 != 1 || (b >> 32 & 0x3FFF) != 64) fprintf(stderr, "not this order of B\n"), abort();
    u64* mine = of_lane(current % WARP);
    for (int i = 0; i < 4; i++) mine[i] = a[i];
    __syncwarp();
    const int g = current % WARP / 4, t = current % 4;
    float left[2][16];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++)
            left[i][k] = bf16_of(of_lane(g * 4 + k % 8 / 2)[i + k / 8 * 2] >> 16 * (k % 2));
    const u32 start = (b & 0x3FFF) << 4;
    for (int i = 0; i < 32; i++) {
        const int n = i / 4 * 8 + 2 * t + i % 2;
        double sum = add ? c[i] : 0;
        for (int k = 0; k < 16; k++) {
            u32 at = start + n / 8 * 1024 + n % 8 * 128 + 2 * k;
            at ^= (at >> 7 & 7) << 4;
            u16 right;
            memcpy(&right, raw + at, 2);
            sum += (double)left[i / 2 % 2][k] * bf16_of(right);
        }
        c[i] = sum;
    }
    __syncwarp();
}
