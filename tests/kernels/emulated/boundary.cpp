// Further machine instructions, of boundary.cu.
#include "cuda.h"

#define CLUSTER
inline void store_there(float* to, u32 rank, float v) { *(float*)(shared[rank] + shared_address(to)) = v; }
inline float divide(float a, float b) { return a / b; }
// Of ranks that run at once: words come one by one, in any order.
inline void put_words(u64* to, u64 first, u64 second) {
    __atomic_store_n(to + 1, second, __ATOMIC_RELAXED);
    give_way();
    __atomic_store_n(to, first, __ATOMIC_RELAXED);
}
inline void get_words(const u64* from, u64& first, u64& second) {
    first = __atomic_load_n(from, __ATOMIC_RELAXED);
    give_way();
    second = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
}
inline void atomicCAS(int* p, int was, int v) { if (*p == was) *p = v; }

#define stream_kernel boundary_kernel
#include "run.cpp"
