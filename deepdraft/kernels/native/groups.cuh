// Products of warp groups (wgmma, sm_90a): rows of A in registers, B in shared memory.
// tests/kernels/emulated has their counterparts on a CPU.

// B as its rows [N, 64] of bf16 in shared memory, 128 bytes each, 16-byte parts turned by the row's
// number (part p of row n stands at p ^ n % 8); `at` is a multiple of 1,024, plus 32 bytes a step.
__device__ __forceinline__ u64 matrix_of(u32 at) {
    return (u64)(at >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
// The same as its columns: matrices of 64 columns each stand 8,192 bytes apart.
__device__ __forceinline__ u64 turned_matrix_of(u32 at) { return (matrix_of(at) & ~((u64)0x3FFF << 16)) | (u64)512 << 16; }

#ifndef EMULATED
// SUMS_n: the registers of c, 64 x n of a warp group.
#define SUMS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define SUMS_128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define SUMS_192 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
#define SUMS_256 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
#define SUMS_OF(c) \
    "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
    "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), \
    "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), \
    "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), \
    "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])

// c = a[64 x 16] b[64 P x 16]^T, plus what it was where `add`; c[i]: columns 64 i..
__device__ __forceinline__ void multiply_group(float (&c)[1][32], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_64
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : SUMS_OF(c[0])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
__device__ __forceinline__ void multiply_group(float (&c)[2][32], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUMS_128
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
                 : SUMS_OF(c[0]), SUMS_OF(c[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
__device__ __forceinline__ void multiply_group(float (&c)[3][32], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %101, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " SUMS_192
                 "{%96, %97, %98, %99}, %100, p, 1, 1, 0; }"
                 : SUMS_OF(c[0]), SUMS_OF(c[1]), SUMS_OF(c[2])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
__device__ __forceinline__ void multiply_group(float (&c)[4][32], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " SUMS_256
                 "{%128, %129, %130, %131}, %132, p, 1, 1, 0; }"
                 : SUMS_OF(c[0]), SUMS_OF(c[1]), SUMS_OF(c[2]), SUMS_OF(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
// c = a[64 x 16] b[64 x 16]^T, plus what it was where `add`; a in shared memory as b is.
__device__ __forceinline__ void multiply_shared(float (&c)[32], u64 a, u64 b, bool add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_64 "%32, %33, p, 1, 1, 0, 0; }"
                 : SUMS_OF(c) : "l"(a), "l"(b), "r"((int)add));
}
// c += a[64 x 16] b[16 x 256]: b as `turned_matrix_of`; 16 of its rows a step, that is 2,048 bytes.
__device__ __forceinline__ void multiply_turned(float (&c)[4][32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " SUMS_256
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : SUMS_OF(c[0]), SUMS_OF(c[1]), SUMS_OF(c[2]), SUMS_OF(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Registers written before are those that the products after it read.
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Sums are not looked at before this.
__device__ __forceinline__ void hold(float (&c)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(c[i])::"memory");
}
// Barriers of some of the block's warps, `threads` of them in all; who arrives does not wait.
__device__ __forceinline__ void groups_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void groups_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Registers of a thread from here on, of a whole warp group.
template <int N> __device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// As copy16; zeros where there is nothing.
__device__ __forceinline__ void copy16_or_zero(u32 to, const u8* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
#endif
