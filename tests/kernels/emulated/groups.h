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
static Meeting named[16];
inline void groups_sync(int id, int threads) { meet(named[id], threads); }
inline void groups_arrive(int id, int threads) {
    if (++named[id].arrived == threads) named[id].arrived = 0, named[id].turn++;
}
template <int N> void registers_more() {}
template <int N> void registers_less() {}
alignas(16) static const u8 nothing[16] = {};
inline void copy16_or_zero(u32 to, const u8* from, bool there) { copy16(to, there ? from : nothing); }

// Element (n, k) of a matrix that begins at `start`; rows of 64 in shared memory, parts turned.
inline float element(u32 start, int n, int k) {
    u32 at = start + n / 8 * 1024 + n % 8 * 128 + 2 * k;
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > sizeof raw) fprintf(stderr, "a matrix is out of place\n"), abort();
    u16 v;
    memcpy(&v, raw + at, 2);
    return bf16_of(v);
}
inline u32 start_of(u64 b) {
    if (b >> 62 != 1 || (b >> 32 & 0x3FFF) != 64) fprintf(stderr, "not this order\n"), abort();
    return (b & 0x3FFF) << 4;
}
// The two rows of A of this lane, from the registers of its warp.
struct Rows { float v[2][16]; };
static Rows rows_of(const u32 (&a)[4]) {
    u64* mine = of_lane(current % WARP);
    for (int i = 0; i < 4; i++) mine[i] = a[i];
    __syncwarp();
    Rows rows;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++)
            rows.v[i][k] = bf16_of(of_lane(current % WARP / 4 * 4 + k % 8 / 2)[i + k / 8 * 2] >> 16 * (k % 2));
    __syncwarp();
    return rows;
}
template <class Of> void add_products(float (&c)[32], const Rows& a, bool add, Of b) {
    for (int i = 0; i < 32; i++) {
        const int n = i / 4 * 8 + current % 4 * 2 + i % 2;
        double sum = add ? c[i] : 0;
        for (int k = 0; k < 16; k++) sum += (double)a.v[i / 2 % 2][k] * b(n, k);
        c[i] = sum;
    }
}
template <int P> void multiply_group(float (&c)[P][32], const u32 (&a)[4], u64 b, bool add) {
    const Rows rows = rows_of(a);
    for (int i = 0; i < P; i++)
        add_products(c[i], rows, add, [start = start_of(b), i](int n, int k) { return element(start, 64 * i + n, k); });
}
static void multiply_turned(float (&c)[4][32], const u32 (&a)[4], u64 b) {
    const Rows rows = rows_of(a);
    const u32 apart = (b >> 16 & 0x3FFF) << 4;
    for (int i = 0; i < 4; i++)
        add_products(c[i], rows, true, [start = start_of(b) + i * apart](int n, int k) { return element(start, k, n); });
}
static void multiply_shared(float (&c)[32], u64 a, u64 b, bool add) {
    Rows rows;
    const int first = current / WARP % 4 * 16 + current % WARP / 4;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++) rows.v[i][k] = element(start_of(a), first + 8 * i, k);
    add_products(c, rows, add, [start = start_of(b)](int n, int k) { return element(start, n, k); });
}
