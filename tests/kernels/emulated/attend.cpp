// Further machine instructions, of attend.cu.
#include "cuda.h"

// Matrix i of 8 x 8 halves: its rows are where lanes 8 i .. 8 i + 7 point.
static void load_matrices(u32 (&d)[4], u32 at, bool turned = false) {
    if (at % 16 || at + 16 > sizeof raw) fprintf(stderr, "a matrix row is out of place\n"), abort();
    u32 lane = current % WARP;
    of_lane(lane)[0] = at;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        u16 two[2];
        for (int k = 0; k < 2; k++) {
            int row = turned ? lane % 4 * 2 + k : lane / 4, col = turned ? lane / 4 : lane % 4 * 2 + k;
            memcpy(&two[k], raw + of_lane(8 * i + row)[0] + 2 * col, 2);
        }
        d[i] = two[0] | (u32)two[1] << 16;
    }
    __syncwarp();
}
static void load_turned_matrices(u32 (&d)[4], u32 at) { load_matrices(d, at, true); }
inline u32 times_bf16(u32 a, u32 b) {
    return pack_bf16(bf16_of(a & 0xFFFF) * bf16_of(b & 0xFFFF), bf16_of(a >> 16) * bf16_of(b >> 16));
}


#define stream_kernel attend_kernel
#include "run.cpp"
