// A CUDA block on a CPU, as far as stream.cu uses one: threads are fibers that give way where they
// wait for each other. Copies of cp.async are carried out no earlier than they are waited for. Reads
// of shared memory may be under way until the reader's `reads_done`: a bulk copy before that is noted.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define EMULATED 1

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { int x, y; };

#ifndef CL
#define CL 1
#endif
constexpr int WARP = 32, MOST = 2560;
static int current, threads;
alignas(128) u8 shared[CL][(SHARED_BYTES + 127) / 128 * 128];   // of each block of a cluster
#define raw shared[current / threads]
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }

// ---- fibers --------------------------------------------------------------------------------

struct Copy { u32 to; const u8* from; };
struct Read { u32 at, bytes; };
struct Fiber {
    ucontext_t context;
    std::vector<u8> stack;
    bool done;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
    std::vector<Read> reads;   // with bulk copies: that may be under way still
};
static bool overwritten;       // a copy came before a read was over
struct Meeting { int arrived, turn; };
static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static Index first_block, gridDim;
static Meeting warps[MOST / WARP], blocks[CL], cluster;
static u64 slots[MOST][8];
#define threadIdx (Index{current % threads, 0})
#define blockIdx (Index{first_block.x + current / threads, first_block.y})

static void give_way() { swapcontext(&fibers[current].context, &scheduler); }
static void meet(Meeting& m, int count) {
    int turn = m.turn;
    if (++m.arrived == count) {
        m.arrived = 0, m.turn++;
        return;
    }
    while (m.turn == turn) give_way();
}
static void __syncwarp() { meet(warps[current / WARP], WARP); }
static void __syncthreads() { meet(blocks[current / threads], threads); }

static u64* of_lane(int lane) { return slots[current / WARP * WARP + lane]; }
template <class T> T exchange(T mine, int lane) {
    u64 bits = 0;
    memcpy(&bits, &mine, sizeof mine);
    of_lane(current % WARP)[0] = bits;
    __syncwarp();
    bits = of_lane(lane)[0];
    __syncwarp();
    memcpy(&mine, &bits, sizeof mine);
    return mine;
}
template <class T> T __shfl_sync(u32, T v, int lane) { return exchange(v, lane); }
template <class T> T __shfl_xor_sync(u32, T v, int by) { return exchange(v, current % WARP ^ by); }
static u32 __ballot_sync(u32, bool v) {
    u32 out = 0;
    of_lane(current % WARP)[0] = v;
    __syncwarp();
    for (int i = 0; i < WARP; i++) out |= (u32)of_lane(i)[0] << i;
    __syncwarp();
    return out;
}
inline bool __all_sync(u32 lanes, bool v) { return __ballot_sync(lanes, v) == lanes; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
    u64 both = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
inline float __expf(float v) { return expf(v); }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __fdividef(float a, float b) { return a / b; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }
inline void __threadfence() {}
inline int atomicAdd(int* p, int v) { int was = *p; *p += v; return was; }

// ---- machine instructions ------------------------------------------------------------------

inline u32 shared_address(const void* p) {
    u64 at = (const u8*)p - raw;
    if (at >= sizeof raw) fprintf(stderr, "not shared memory\n"), abort();
    return at;
}
inline void copy16(u32 to, const u8* from) {
    if (to % 16 || (u64)from % 16) fprintf(stderr, "a copy is not aligned\n"), abort();
    memset(raw + to, 0xFF, 16);  // what is there now is lost
    fibers[current].open.push_back({to, from});
}
inline void commit() {
    Fiber& f = fibers[current];
    f.groups.push_back(f.open);
    f.open.clear();
}
template <int N> void wait_copies() {
    Fiber& f = fibers[current];
    while (f.groups.size() > N) {
        for (Copy c : f.groups.front()) memcpy(raw + c.to, c.from, 16);
        f.groups.pop_front();
    }
}
template <class T> T load_shared(u32 at) {
    T v;
    memcpy(&v, raw + at, sizeof v);
#ifdef BULK
    fibers[current].reads.push_back({at, sizeof v});
#endif
    return v;
}
inline uint4 load_shared16(u32 at) { return load_shared<uint4>(at); }
inline u32 load_shared4(u32 at) { return load_shared<u32>(at); }
template <class T> T load_here(const T* from) { return *from; }
struct Barrier {
    u16 pending, count, phase;
    short awaited;   // pieces of 16 bytes on their way from other blocks
    void settle() { if (pending == 0 && awaited == 0) pending = count, phase++; }
};
inline Barrier& barrier(u32 at) { return *(Barrier*)(raw + at); }
inline void barrier_init(u32 at, u32 count) { barrier(at) = {(u16)count, (u16)count, 0, 0}; }
inline void barrier_arrive(u32 at) { barrier(at).pending--, barrier(at).settle(); }
inline void barrier_arrive_if(u32 at, bool mine) { if (mine) barrier_arrive(at); }
inline void barrier_wait(u32 at, u32 phase) { while ((barrier(at).phase & 1) == phase) give_way(); }
inline bool barrier_passed(u32 at, u32 phase) { return (barrier(at).phase & 1) != phase; }
inline void barrier_expect(u32 at, u32) { barrier_arrive(at); }
inline void copy_bulk(u32 to, const u8* from, u32 bytes, u32) {
    if (to % 16 || bytes % 16 || (u64)from % 16) fprintf(stderr, "a copy is not aligned\n"), abort();
    for (int i = current / threads * threads, end = i + threads; i < end; i++)
        for (Read r : fibers[i].reads) overwritten |= r.at < to + bytes && to < r.at + r.bytes;
    memcpy(raw + to, from, bytes);
}
inline void barriers_made() {}
inline void reads_done() { fibers[current].reads.clear(); }
static int arrived_turn[MOST];
inline void cluster_arrive() {
    arrived_turn[current] = cluster.turn;
    if (++cluster.arrived == CL * threads) cluster.arrived = 0, cluster.turn++;
}
inline void cluster_wait() { while (cluster.turn == arrived_turn[current]) give_way(); }
inline u32 cluster_rank() { return current / threads; }
inline Barrier& barrier_there(void* own, u32 rank) { return *(Barrier*)(shared[rank] + shared_address(own)); }
inline void send_there(void* to, u32 rank, const float (&v)[4], void* own) {
    memcpy(shared[rank] + shared_address(to), v, 16);
    barrier_there(own, rank).awaited--, barrier_there(own, rank).settle();
}
inline void barrier_expect_sent(u32 at, u32 bytes) { barrier(at).awaited += bytes / 16, barrier_arrive(at); }
inline void arrive_there(void* own, u32 rank) { barrier_there(own, rank).pending--, barrier_there(own, rank).settle(); }
inline void barrier_wait_cluster(u32 at, u32 phase) { barrier_wait(at, phase); }
inline void dependency_wait() {}
inline void launch_dependents() {}

inline float half_value(u16 v) { _Float16 h; memcpy(&h, &v, 2); return h; }
inline u16 half_bits(float v) { _Float16 h = v; u16 b; memcpy(&b, &h, 2); return b; }
inline float bf16_of(u16 v) { return __uint_as_float((u32)v << 16); }
static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16) {
    u64* mine = of_lane(current % WARP);
    for (int i = 0; i < 4; i++) mine[i] = a[i];
    mine[4] = b0, mine[5] = b1;
    __syncwarp();
    auto value = [&](u64 word, int which) {
        u16 bits = word >> 16 * which;
        return (double)(bf16 ? bf16_of(bits) : half_value(bits));
    };
    int g = current % WARP / 4, t = current % 4;
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            u64 left = of_lane(g * 4 + k % 8 / 2)[i / 2 + k / 8 * 2];
            u64 right = of_lane((2 * t + i % 2) * 4 + k % 8 / 2)[4 + k / 8];
            sum += value(left, k % 2) * value(right, k % 2);
        }
        c[i] = sum;
    }
    __syncwarp();
}

inline float e4m3_value(u8 v) {
    int e = v >> 3 & 15, m = v & 7;
    if ((v & 127) == 127) return NAN;
    float size = e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return v & 128 ? -size : size;
}
inline u32 either(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }
inline u32 halves_of_e4m3(u16 two) {
    return half_bits(e4m3_value(two & 255)) | (u32)half_bits(e4m3_value(two >> 8)) << 16;
}
inline u32 scaled_halves(u32 pair, float by) {
    return half_bits(half_value(pair) * by) | (u32)half_bits(half_value(pair >> 16) * by) << 16;
}
inline u16 bf16_bits(float v) {
    u32 b = __float_as_uint(v);
    if (std::isnan(v)) return 0x7FFF;
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_bits(low) | (u32)bf16_bits(high) << 16; }
inline u32 bf16s_of_e4m3(u16 two) { return pack_bf16(e4m3_value(two & 255), e4m3_value(two >> 8)); }
inline u32 pack_halves(float low, float high) { return half_bits(low) | (u32)half_bits(high) << 16; }
inline u8 e4m3_bits(float v) {
    if (std::isnan(v)) return 127;
    float size = fminf(fabsf(v), 448.f);
    int e = size < ldexpf(1, -6) ? -6 : ilogbf(size);
    float steps = nearbyintf(ldexpf(size, 3 - e));  // to even
    if (steps == 16.f) steps = 8.f, e++;
    u8 code = steps < 8.f ? (u8)steps : (u8)((e + 7) << 3 | ((u8)steps - 8));
    return code | (std::signbit(v) ? 128 : 0);
}
inline u32 e4m3_codes(float a, float b, float c, float d) {
    return e4m3_bits(a) | e4m3_bits(b) << 8 | e4m3_bits(c) << 16 | (u32)e4m3_bits(d) << 24;
}
