// Further machine instructions, of route.cu. Blocks run one after another: the last one chooses.
#include "cuda.h"

inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }

#define stream_kernel route_kernel
#include "run.cpp"
