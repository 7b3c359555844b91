// Runs every block of a launch, or every cluster of CL blocks, one after another. Returns 0; 1: threads
// wait for each other for ever; 2: a copy overwrote what somebody may still have been reading.
#ifdef JOINED
#define CL SPLIT
#endif
#include "cuda.h"
#include SOURCE

static const Params* given;

static void body() {
    stream_kernel(*given);
    fibers[current].done = true;
    give_way();
}

extern "C" int emulate(const Params* params, int grid, int row_tiles, int count) {
    given = params, threads = count, overwritten = false;
    gridDim = {grid, row_tiles};
    for (int y = 0; y < row_tiles; y++)
        for (int x = 0; x < grid; x += CL) {
            first_block = {x, y};
            memset(shared, 0xFF, sizeof shared);
            memset(warps, 0, sizeof warps);
            memset(blocks, 0, sizeof blocks);
            cluster = {0, 0};
            fibers = std::vector<Fiber>(CL * count);
            for (Fiber& f : fibers) {
                getcontext(&f.context);
                f.stack.resize(64 << 10), f.done = false;
                f.context.uc_stack.ss_sp = f.stack.data();
                f.context.uc_stack.ss_size = f.stack.size();
                makecontext(&f.context, body, 0);
            }
            for (int left = CL * count, rounds = 0; left > 0; rounds++) {
                if (rounds > 1000000) return 1;
                for (current = 0; current < CL * count; current++) {
                    if (fibers[current].done) continue;
                    swapcontext(&scheduler, &fibers[current].context);
                    left -= fibers[current].done;
                }
            }
        }
    return overwritten ? 2 : 0;
}
