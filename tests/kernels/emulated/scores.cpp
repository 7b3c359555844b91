// Further machine instructions, of kernels that multiply by warp groups.
#include "groups.h"

#define stream_kernel scores_kernel
#include "run.cpp"
