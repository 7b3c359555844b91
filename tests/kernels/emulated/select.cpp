// select.cu needs no further machine instructions.
#include "cuda.h"

inline u32 min(u32 a, u32 b) { return a < b ? a : b; }

#define stream_kernel select_kernel
#include "run.cpp"
