// Further machine instructions, of route.cu. Blocks run one after another: the last one chooses.
#include "cuda.h"

inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }

inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
static u32 __reduce_max_sync(u32, u32 v) {
    for (int by = 16; by > 0; by /= 2) v = max(v, __shfl_xor_sync(~0u, v, by));
    return v;
}
static u32 __reduce_min_sync(u32, u32 v) { return ~__reduce_max_sync(~0u, ~v); }
inline int arrive(int* count) { return (*count)++; }

#define stream_kernel route_kernel
#include "run.cpp"
