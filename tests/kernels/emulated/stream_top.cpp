// stream_top.cu needs the products of warp groups only.
#include "groups.h"

#define stream_kernel stream_top_kernel
#include "run.cpp"
