// Machine instructions of sm_90 and the words that they work on, for every source of this folder.
// tests/kernels/emulated has their counterparts on a CPU.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#ifndef EMULATED
extern __shared__ __align__(128) u8 raw[];

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ uint4 load_shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ u32 load_shared4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
// Asked for where they stand: the compiler leaves their order to us.
__device__ __forceinline__ float load_here(const float* from) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_here(const float2* from) {
    float2 v;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ float4 load_here(const float4* from) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_turned_matrices(u32 (&d)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(at) : "memory");
}
// Of a warp's threads the one for which `mine` holds; no branch.
__device__ __forceinline__ void barrier_arrive_if(u32 at, bool mine) {
    asm volatile("{ .reg .b64 t; .reg .pred p; setp.ne.u32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(at), "r"((u32)mine) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 phase) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(at), "r"(phase) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
// What this thread has read of shared memory has come before any bulk copy made after this.
__device__ __forceinline__ void reads_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void dependency_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 v;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}
// Store into the shared memory of another block of the cluster.
__device__ __forceinline__ void store_there(float* to, u32 rank, float v) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                 "st.shared::cluster.f32 [there], %2; }" ::"r"(at), "r"(rank), "f"(v) : "memory");
}
// 16 bytes into the shared memory of another block, whose barrier counts them when they are there.
__device__ __forceinline__ void send_there(void* to, u32 rank, const float (&v)[4], void* barrier) {
    const u32 at = (u32)__cvta_generic_to_shared(to), counts = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("{ .reg .b32 there, counts;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counts, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counts]; }"
                 ::"r"(at), "r"(counts), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ void barrier_expect_sent(u32 at, u32 bytes) { barrier_expect(at, bytes); }
__device__ __forceinline__ void arrive_there(void* barrier, u32 rank) {
    asm volatile("{ .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
                 ::"r"((u32)__cvta_generic_to_shared(barrier)), "r"(rank) : "memory");
}
__device__ __forceinline__ void barrier_wait_cluster(u32 at, u32 phase) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(at), "r"(phase) : "memory");
}
// What the block wrote before can be read by whoever sees the count, and the other way round.
__device__ __forceinline__ int arrive(int* count) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}
// Two words each whole, seen in time by kernels of any GPU; read past the caches that these do not
// write through.
__device__ __forceinline__ void put_words(u64* to, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void get_words(const u64* from, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16) {
    if (bf16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Bits of a where the mask has ones, of b elsewhere: one instruction.
__device__ __forceinline__ u32 either(u32 a, u32 b, u32 mask) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(v) : "r"(a), "r"(b), "r"(mask));
    return v;
}
__device__ __forceinline__ u32 halves_of_e4m3(u16 two) {
    u32 v;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(two));
    return v;
}
__device__ __forceinline__ u32 scaled_halves(u32 pair, float by) {
    u32 v;
    asm("{ .reg .b32 f; cvt.rn.f16x2.f32 f, %2, %2; mul.rn.f16x2 %0, %1, f; }" : "=r"(v) : "r"(pair), "f"(by));
    return v;
}
__device__ __forceinline__ u32 pack_halves(float low, float high) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ u32 bf16s_of_e4m3(u16 two) {
    u32 v, pair = halves_of_e4m3(two);
    asm("{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, %1; cvt.f32.f16 a, l; cvt.f32.f16 b, h;\n"
        "cvt.rn.bf16x2.f32 %0, b, a; }" : "=r"(v) : "r"(pair));
    return v;
}
__device__ __forceinline__ u32 e4m3_codes(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)low | ((u32)high << 16);
}
__device__ __forceinline__ u32 times_bf16(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
__device__ __forceinline__ float divide(float a, float b) {
    float v;
    asm("div.full.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
#endif

__device__ __forceinline__ float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }
