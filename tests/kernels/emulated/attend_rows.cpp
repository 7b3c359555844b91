// attend_rows.cu needs the products of warp groups only.
#include "groups.h"

#define stream_kernel attend_rows_kernel
#include "run.cpp"
