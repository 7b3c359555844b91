// Further machine instructions, of boundary.cu.
#include "cuda.h"

#define CLUSTER
static int arrived_turn[MOST];
inline void cluster_arrive() {
    arrived_turn[current] = cluster.turn;
    if (++cluster.arrived == CL * threads) cluster.arrived = 0, cluster.turn++;
}
inline void cluster_wait() { while (cluster.turn == arrived_turn[current]) give_way(); }
inline void store_there(float* to, u32 rank, float v) { *(float*)(shared[rank] + shared_address(to)) = v; }
inline u32 cluster_rank() { return current / threads; }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float divide(float a, float b) { return a / b; }

#define stream_kernel boundary_kernel
#include "run.cpp"
