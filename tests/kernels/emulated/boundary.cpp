// Further machine instructions, of boundary.cu. Blocks run one after another: clusters of one.
#include "cuda.h"

#define CLUSTER
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float divide(float a, float b) { return a / b; }

#define stream_kernel boundary_kernel
#include "run.cpp"
