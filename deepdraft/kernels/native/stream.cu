// Few-row products with weights that are read once: dense FP8 maps and routed MXFP4 experts, sm_90.
//
// One block a multiprocessor (two of up to 8 warps) stays for the whole launch. Its WK * WM warps
// share the work by
// columns (WK) and by blocks of 32 output rows (WM). Weights come through rings in shared memory:
//   without BULK a warp has a ring of its own, filled by cp.async: a thread copies exactly the bytes it
//   multiplies later, so no barrier is needed;
//   with BULK one more thread has what all warps read in a step, which lies together, brought by bulk
//   copies into one ring, each place guarded by two barriers (ready, taken).
// Sums of the WK warps are added in order by one more warp while the others go on with the next unit.
//
// 8 batch rows are the columns of mma.m16n8k16; their values stay in registers from unit to unit.
// A row's bits depend on that row and the weights alone: the order of every sum is fixed by
// NG, WK and SPLIT.
//
// Built once for each set of macros (deepdraft/kernels/native/build.py):
//   KIND   1 dense FP8 x FP8, 2 dense FP8 x bf16 (multiplied as halves), 3 experts up, 4 experts down
//   NG     groups of 32 columns of a warp's unit     ST     groups copied and waited for together
//   WK WM  warps by columns and by rows              SPLIT  parts of the columns among blocks
//   DEPTH  steps that a ring holds (experts: those of two units at most)
//   FOLD   experts: scales of rows go into the rows' halves, relative to the largest of a warp's
//   OUT    dense: 0 bf16, 1 float32, 2 bf16 values quantised to FP8 in groups of 32
//   JOINED dense, 1: the SPLIT parts of the columns are the blocks of a cluster; the sums of the others
//          go into the first one's shared memory, which finishes (the same bits)
//   BULK   defined or not: how weights are copied (the same bits)
//   EVERY_LANE  every lane arrives at the barriers of the sums, as racecheck follows it (the same bits)
//   SHARED_BYTES  of dynamic shared memory
//
// Letters: R batch rows (a multiple of 8), N output rows, K columns, G = K / 32.

#include "machine.cuh"

#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif
#ifndef JOINED
#define JOINED 0
#endif
#if JOINED && !defined(EMULATED)
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

constexpr bool FP4 = KIND >= 3;
constexpr bool BF16_ROWS = KIND == 2;
constexpr bool UP = KIND == 3;
constexpr bool DOWN = KIND == 4;
constexpr int WARPS = WK * WM;
constexpr int CODE_BYTES = FP4 ? 512 : 1024;        // of a group of a warp's unit
constexpr int SCALE_BYTES = FP4 ? NG * 32 : 0;
constexpr int STEPS = NG / ST;
constexpr int STEP_BYTES = ST * CODE_BYTES;
#ifndef BULK
constexpr int RING_BYTES = DEPTH * STEP_BYTES + 3 * SCALE_BYTES;
#else
constexpr int SLOT_CODES = WARPS * STEP_BYTES;
constexpr int SLOT_BYTES = SLOT_CODES + (FP4 ? WARPS * ST * 32 : 0);
constexpr int PRODUCER = WARPS + (WK > 1 ? 1 : 0);
#endif
#ifndef BULK
constexpr int LISTER = 0;
#else
constexpr int LISTER = PRODUCER;
#endif
constexpr int X_WORDS = BF16_ROWS || FOLD ? 4 : 2;          // of a group's row values in one thread
static_assert(NG % ST == 0, "a step holds whole groups");
static_assert(!FP4 || DEPTH <= 2 * STEPS, "there is room for the scales of two units ahead");
static_assert(FP4 || !FOLD, "dense products apply scales to sums");
static_assert(!JOINED || (!FP4 && SPLIT > 1 && WK > 1), "parts of dense products are joined by the warps that add");

struct Params {
    const u8* w;             // codes in fragment order (layout of fragments.py)
    const u8* ws;            // E8M0 bytes
    const void* x;           // FP8 codes u8 [R, X]; bf16 [R, X]; down: bf16 [R * picks, K]
    const float* xs;         // FP8: scales [X / 32, R]
    void* y;                 // dense [R, N]; experts: bf16 [R * picks, N], N = F for up
    float* ys;               // OUT 2: scales [N / 32, R]
    float* part;             // SPLIT > 1: [row tiles, units of 32, SPLIT, 256]
    int* arrive;             // SPLIT > 1: [row tiles, units of 32], zero between launches
    const int* experts;      // [row tiles, places], -1 beyond the last
    const int* slots;        // [row tiles, places, 8]
    const float* weights;    // up: [R, picks]
    int rows, groups, units; // R, G, blocks of 32 weight rows (of one expert)
    int x_width;             // values of a row of x
    int block_units;         // dense: units of a block of a block-diagonal map, 0: none
    int picks, places;
    float limit;
    int early;               // launched programmatically: rings are filled before the rows are there
};

#include "stream_groups.cuh"
#include "stream_results.cuh"

// ---- the kernel ----------------------------------------------------------------------------

constexpr int PLACES = 64;   // of a list of experts
struct Shared {
    int experts[FP4 ? PLACES : 1];
    alignas(16) int slots[FP4 ? PLACES : 1][8];
    int count;
    alignas(8) u64 listed;
    alignas(8) u64 full[2];
    alignas(8) u64 empty[2];
    alignas(16) float4 part[WK > 1 ? 2 : 1][WK > 1 ? WARPS : 1][2][32];
#if JOINED
    alignas(8) u64 came[2];      // first block of a cluster: sums of the others are there
    alignas(8) u64 gone[2];      // the others: they have been read
    alignas(16) float4 others[2][SPLIT - 1][WM][2][32];
#endif
#ifndef BULK
    alignas(16) u8 ring[WARPS][RING_BYTES];
#else
    alignas(8) u64 ready[DEPTH];
    alignas(8) u64 taken[DEPTH];
    alignas(128) u8 ring[DEPTH][SLOT_BYTES];
#endif
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher reserves what the kernel uses");

// A thread's part of one step.
struct Step {
    uint4 codes[ST][FP4 ? 1 : 2];
    u32 scales[ST];
    __device__ __forceinline__ void load(u32 at, u32 scales_at) {
#pragma unroll
        for (int j = 0; j < ST; j++) {
#ifndef BULK
            codes[j][0] = load_shared16(at + j * CODE_BYTES);
            if (FP4) scales[j] = load_shared4(scales_at + j * 32);
            else codes[j][FP4 ? 0 : 1] = load_shared16(at + j * CODE_BYTES + 512);
#else
            codes[j][0] = load_shared16(at + j * WK * CODE_BYTES);
            if (FP4) scales[j] = load_shared4(scales_at + j * WK * 32);
            else codes[j][FP4 ? 0 : 1] = load_shared16(at + j * WK * CODE_BYTES + 512);
#endif
        }
    }
};

// A block's tasks: sets of WM units, of one expert (or one part of the columns) after another, so
// that rows change seldom.
struct Task {
    int outer, set;
    __device__ __forceinline__ void next(int sets) {
        if (++set == sets) set = 0, outer++;
    }
};

// All of the list in one trip to memory, by one warp.
__device__ __forceinline__ void read_list(Shared& sh, const Params& p, int row_tile, int lane) {
    constexpr int PIECES = PLACES * 2 / 32;
    const uint4* slots = (const uint4*)(p.slots + row_tile * p.places * 8);
    int expert[PLACES / 32], count = 0;
    uint4 piece[PIECES];
#pragma unroll
    for (int i = 0; i < PLACES / 32; i++) {
        const int at = i * 32 + lane;
        expert[i] = at < p.places ? __ldcg(p.experts + row_tile * p.places + at) : -1;
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = i * 32 + lane;
        piece[i] = at < 2 * p.places ? __ldcg(slots + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < PLACES / 32; i++) {
        sh.experts[i * 32 + lane] = expert[i];
        count += __popc(__ballot_sync(~0u, expert[i] >= 0));
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) ((uint4*)sh.slots)[i * 32 + lane] = piece[i];
    if (lane == 0) sh.count = count;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&sh.listed));
}
// A warp has stored, or has read.
__device__ __forceinline__ void arrive_warp(u64& barrier, int lane) {
    if (EVERY_LANE || lane == 0) barrier_arrive(shared_address(&barrier));
}

#ifndef BULK
extern "C" __global__ void CLUSTER __launch_bounds__(WARPS * 32 + (WK > 1 ? 32 : 0), WARPS <= 8 ? 2 : 1)
#else
extern "C" __global__ void CLUSTER __launch_bounds__(PRODUCER * 32 + 32, WARPS <= 8 ? 2 : 1)
#endif
stream_kernel(const __grid_constant__ Params p) {
    Shared& sh = *(Shared*)raw;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row_tile = blockIdx.y;
    const int sets = (p.units + WM - 1) / WM;
    const int wk = warp % WK, wm = warp / WK, g = lane >> 2, t = lane & 3;
    if (!FP4) launch_dependents();
    if (warp == 0) {
        if (FP4 && lane == 0) barrier_init(shared_address(&sh.listed), 1);
        if (lane < 2 && WK > 1) {
            barrier_init(shared_address(&sh.full[lane]), WARPS * (EVERY_LANE ? 32 : 1));
            barrier_init(shared_address(&sh.empty[lane]), EVERY_LANE ? 32 : 1);
#if JOINED
            barrier_init(shared_address(&sh.came[lane]), 1);
            barrier_init(shared_address(&sh.gone[lane]), 1);
#endif
        }
#ifdef BULK
        if (lane < DEPTH) {
            barrier_init(shared_address(&sh.ready[lane]), 1);
            barrier_init(shared_address(&sh.taken[lane]), WARPS);
        }
        barriers_made();
#endif
    }
    __syncthreads();
#if JOINED
    const int rank = cluster_rank();
    cluster_arrive();   // its barriers are made; who reaches into another block waits for that
#else
    const int rank = 0;
#endif
    // Nobody waits for the list longer than the warp that reads it: the one that copies, if there is one.
    if (FP4 && warp == LISTER) {
        if (UP) dependency_wait();   // down: the list is older than the kernel before this one
        read_list(sh, p, row_tile, lane);
    }
    RawRows raw_rows = {};
    if (UP && warp < WARPS) {
        dependency_wait();
        fetch_rows(raw_rows, p, row_tile, 0, wk, g, t);
    }
    if (FP4) barrier_wait(shared_address(&sh.listed), 0);
    const int tasks = (FP4 ? sh.count : JOINED ? 1 : SPLIT) * sets;
    const int sharer = blockIdx.x / (JOINED ? SPLIT : 1), sharers = gridDim.x / (JOINED ? SPLIT : 1);
    const int first_task = (int)((u64)tasks * sharer / sharers);
    const int end_task = (int)((u64)tasks * (sharer + 1) / sharers);
    Task k = {JOINED ? rank : first_task / sets, first_task % sets};

#ifndef BULK
    if (warp == WARPS) {  // adds the warps' sums
#else
    if (warp == PRODUCER) {  // copies what a step of all warps reads: it lies together
        if (lane == 0) {
            int slot = 0, turn = 0;
            for (int task = first_task; task < end_task; task++, k.next(sets))
                for (int step = 0; step < STEPS; step++) {
                    const u32 ready = shared_address(&sh.ready[slot]), to = shared_address(sh.ring[slot]);
                    if (turn > 0) barrier_wait(shared_address(&sh.taken[slot]), turn - 1 & 1);
                    barrier_expect(ready, SLOT_BYTES);
#pragma unroll
                    for (int m = 0; m < WM; m++) {
                        u64 unit = min(k.set * WM + m, p.units - 1);
                        if (FP4) unit += (u64)sh.experts[k.outer] * p.units;
                        const u64 from = unit * p.groups + (FP4 ? 0 : k.outer * WK * NG) + step * ST * WK;
                        copy_bulk(to + m * WK * STEP_BYTES, p.w + from * CODE_BYTES, WK * STEP_BYTES, ready);
                        if (FP4) copy_bulk(to + SLOT_CODES + m * WK * ST * 32, p.ws + from * 32, WK * ST * 32, ready);
                    }
                    if (++slot == DEPTH) slot = 0, turn++;
                }
        }
        __syncwarp();
        dependency_wait();
#if JOINED
        cluster_wait();
#endif
        return;
    }

    if (WK > 1 && warp == WARPS) {  // adds the warps' sums
#endif
        dependency_wait();
        if (FP4) launch_dependents();
#if JOINED
        cluster_wait();
#endif
        Picks picks;
        int held = -1;
        for (int task = first_task; task < end_task; task++, k.next(sets)) {
            const int turn = task - first_task, slot = turn & 1;
            if (held != k.outer) picks = load_picks(p, sh.slots, row_tile, k.outer, lane & 3), held = k.outer;
            barrier_wait(shared_address(&sh.full[slot]), turn >> 1 & 1);
            constexpr int TOGETHER = WM < 2 ? WM : 2;  // more do not fit into registers
#pragma unroll 1
            for (int first = 0; first < WM; first += TOGETHER) {
                float sum[TOGETHER][2][4];
#pragma unroll
                for (int m = 0; m < TOGETHER; m++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int own = (first + m) * WK;
                        float4 v = sh.part[WK > 1 ? slot : 0][WK > 1 ? own : 0][i][lane];
                        sum[m][i][0] = v.x, sum[m][i][1] = v.y, sum[m][i][2] = v.z, sum[m][i][3] = v.w;
#pragma unroll
                        for (int j = 1; j < (WK > 1 ? WK : 2); j++) {
                            float4 o = sh.part[WK > 1 ? slot : 0][WK > 1 ? own + j : 0][i][lane];
                            sum[m][i][0] += o.x, sum[m][i][1] += o.y, sum[m][i][2] += o.z, sum[m][i][3] += o.w;
                        }
                    }
                if (first + TOGETHER >= WM) {
                    if (JOINED) reads_done();
                    __syncwarp();
                    arrive_warp(sh.empty[slot], lane);
                }
#if JOINED
                if (rank > 0) {
                    if (first == 0 && turn >= 2) barrier_wait_cluster(shared_address(&sh.gone[slot]), (turn >> 1) + 1 & 1);
#pragma unroll
                    for (int m = 0; m < TOGETHER; m++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            send_there(&sh.others[slot][rank - 1][first + m][i][lane], 0, sum[m][i], &sh.came[slot]);
                    continue;
                }
                if (first == 0) {
                    if (lane == 0) barrier_expect_sent(shared_address(&sh.came[slot]), (SPLIT - 1) * WM * 1024);
                    barrier_wait_cluster(shared_address(&sh.came[slot]), turn >> 1 & 1);
                }
#pragma unroll
                for (int m = 0; m < TOGETHER; m++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int j = 0; j < SPLIT - 1; j++) {
                            const float4 o = sh.others[slot][j][first + m][i][lane];
                            sum[m][i][0] += o.x, sum[m][i][1] += o.y, sum[m][i][2] += o.z, sum[m][i][3] += o.w;
                        }
                if (first + TOGETHER >= WM) {
                    reads_done();
                    __syncwarp();
                    if (lane < SPLIT - 1) arrive_there(&sh.gone[slot], lane + 1);
                }
#endif
#pragma unroll
                for (int m = 0; m < TOGETHER; m++) {
                    const int unit = k.set * WM + first + m;
                    if (unit < p.units) finish(p, sum[m], row_tile, unit, k.outer, picks, lane);
                }
            }
        }
#if JOINED
        // A block stays until nobody reaches into it any more.
        for (int turn = max(end_task - first_task - 2, 0); rank > 0 && turn < end_task - first_task; turn++)
            barrier_wait_cluster(shared_address(&sh.gone[turn & 1]), turn >> 1 & 1);
#endif
        return;
    }

#ifndef BULK
    const u32 ring = shared_address(sh.ring[warp]), mine = ring + lane * 16;
    const u32 scale_ring = ring + DEPTH * STEP_BYTES;
#else
    const u32 mine = shared_address(sh.ring[0]) + (wm * ST * WK + wk) * CODE_BYTES + lane * 16;
    const u32 my_scales = shared_address(sh.ring[0]) + SLOT_CODES + (wm * ST * WK + wk) * 32 + g * 4;
#endif
    // Where the codes and scales of a task start; a set's last units may be missing.
    auto start = [&](const Task& k) -> u64 {
        u64 unit = min(k.set * WM + wm, p.units - 1);
        if (FP4) unit += (u64)sh.experts[k.outer] * p.units;
        return unit * p.groups + (FP4 ? 0 : k.outer * WK * NG) + wk;
    };
#ifndef BULK
    auto copy_step = [&](u64 from, u32 to, int step) {
#pragma unroll
        for (int i = 0; i < ST; i++) {
            const u8* codes = p.w + (from + (step * ST + i) * WK) * CODE_BYTES + lane * 16;
            copy16(to + i * CODE_BYTES, codes);
            if (!FP4) copy16(to + i * CODE_BYTES + 512, codes + 512);
        }
    };
    auto copy_scales = [&](u64 from, u32 to) {
        if (FP4 && lane < 2 * NG) copy16(to + lane * 16, p.ws + (from + (lane >> 1) * WK) * 32 + (lane & 1) * 16);
    };
    // Three places for scales, as those of a unit are read until its end: now, next, later.
    u32 scales_now = scale_ring, scales_next = scale_ring + SCALE_BYTES, scales_later = scales_next + SCALE_BYTES;
#endif
    // Which rows a task multiplies, and where a warp's groups of them start.
    auto block_of = [&](const Task& k) { return p.block_units ? k.set * WM / p.block_units : 0; };
    auto rows_of = [&](const Task& k) { return UP ? 0 : DOWN ? k.outer : block_of(k) * SPLIT + k.outer; };
    auto first_group = [&](const Task& k) { return FP4 ? wk : block_of(k) * p.groups + k.outer * WK * NG + wk; };
    // Rows are asked for before the rings are filled, or they would wait behind all these bytes; but
    // where the launch is early, they are not there yet.
    const bool some = first_task < end_task;
    // Down: which pick of row g an expert works for, -1: none.
    auto slot_of = [&](const Task& k) { return DOWN && some ? sh.slots[k.outer][g] : 0; };
    if (!UP && !p.early) {
        dependency_wait();
        if (some) fetch_rows(raw_rows, p, row_tile, slot_of(k), first_group(k), g, t);
    }
    // Dense: one byte a group; thread i keeps that of group i.
    auto scale_byte = [&](u64 from) -> u32 { return !FP4 && lane < NG ? p.ws[from + lane * WK] : 0; };
    u32 byte_now = some ? scale_byte(start(k)) : 0, byte_next = 0;
#ifndef BULK
    // The next step to be copied: of task `ahead`, which starts at `from`.
    int ahead = first_task;
    Task k_ahead = k;
    u64 from = 0;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        if (d && d % STEPS == 0) ahead++, k_ahead.next(sets);
        if (ahead < end_task) {
            if (d % STEPS == 0) {
                from = start(k_ahead);
                copy_scales(from, d ? scales_next : scales_now);
            }
            copy_step(from, mine + d * STEP_BYTES, d % STEPS);
        }
        commit();
    }
#endif
    if (!UP && p.early) {
        dependency_wait();
        if (some) fetch_rows(raw_rows, p, row_tile, slot_of(k), first_group(k), g, t);
    }
    // Not before the list is there: the down product reads it before it waits.
    if (FP4) launch_dependents();

    Rows rows;
    Picks picks;
    // What the rows and the picks in registers belong to.
    int held = rows_of(k), held_picks = -1;
    take_rows(rows, raw_rows, t);
#ifndef BULK
    u32 ring_at = mine;
#endif
#ifndef BULK
    Step next;
    wait_copies<DEPTH - 1>();
    if (FP4) __syncwarp();  // scales are other threads' copies
    next.load(ring_at, scales_now + g * 4);
#else
    // Where a step lies and how often its place has been used: known when compiled as far as can be.
    auto place_of = [&](int turn, int step) -> int {
        if (STEPS % DEPTH == 0) return step % DEPTH;
        return DEPTH % STEPS == 0 ? turn % (DEPTH / STEPS) * STEPS + step : (turn * STEPS + step) % DEPTH;
    };
    auto lap_of = [&](int turn, int step) -> int {
        if (STEPS % DEPTH == 0) return turn * (STEPS / DEPTH) + step / DEPTH;
        return DEPTH % STEPS == 0 ? turn / (DEPTH / STEPS) : (turn * STEPS + step) / DEPTH;
    };
    const u32 ready = shared_address(&sh.ready[0]), taken = shared_address(&sh.taken[0]);
    auto read_step = [&](Step& to, int turn, int step) {
        const int at = place_of(turn, step);
        barrier_wait(ready + 8 * at, lap_of(turn, step) & 1);
        to.load(mine + at * SLOT_BYTES, my_scales + at * SLOT_BYTES);
    };
    // A place is given back when what was read of it has come: an arrival does not wait for loads under
    // way, and the copy that follows it is made by another proxy. (Without the fence weights of the next
    // task were there before those of this one were read, beside kernels that keep the memory busy.)
    auto give_back = [&](int turn, int step) {
        reads_done();
        __syncwarp();
        barrier_arrive_if(taken + 8 * place_of(turn, step), lane == 0);
    };
#endif
    for (int task = first_task; task < end_task; task++, k.next(sets)) {
        const int turn = task - first_task, slot = turn & 1;
        if (held != rows_of(k)) {
            fetch_rows(raw_rows, p, row_tile, slot_of(k), first_group(k), g, t);
            take_rows(rows, raw_rows, t);
            held = rows_of(k);
        }
        if (!FP4) {
            if (task + 1 < end_task) {
                Task following = k;
                following.next(sets);
                byte_next = scale_byte(start(following));
            }
        }
        float acc[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#ifdef BULK
            // Read when it is multiplied: other warps fill the time, and registers hold more groups.
            Step now;
            read_step(now, turn, step);
#else
            // What was read in the turn before is multiplied now. The step that comes DEPTH later
            // takes its place, and the next one is read.
            const Step now = next;
            const int step_ahead = (step + DEPTH) % STEPS;
            if (step_ahead == 0 && ++ahead < end_task) k_ahead.next(sets), from = start(k_ahead);
            if (ahead < end_task) {
                copy_step(from, ring_at, step_ahead);
                if (step_ahead == 0) copy_scales(from, (step + DEPTH) / STEPS == 1 ? scales_next : scales_later);
            }
            commit();
            ring_at = ring_at + STEP_BYTES == mine + DEPTH * STEP_BYTES ? mine : ring_at + STEP_BYTES;
            wait_copies<DEPTH - 1>();
            if (step + 1 < STEPS) {
                next.load(ring_at, scales_now + (step + 1) * ST * 32 + g * 4);
            } else {
                if (FP4) __syncwarp();
                next.load(ring_at, scales_next + g * 4);
            }
#endif
#pragma unroll
            for (int j = 0; j < ST; j++) {
                const int i = step * ST + j, si = BF16_ROWS || FOLD ? 0 : i;
                const float s0 = BF16_ROWS ? 1.f : rows.s[si][0], s1 = BF16_ROWS ? 1.f : rows.s[si][1];
                if (FP4) {
                    multiply_fp4(acc, now.codes[j][0], now.scales[j], rows.x[i], s0, s1);
                } else {
                    const float scale = __uint_as_float(__shfl_sync(~0u, byte_now, i) << 23);
                    multiply_fp8(acc[0], now.codes[j][0], scale, rows.x[i], s0, s1);
                    multiply_fp8(acc[1], now.codes[j][FP4 ? 0 : 1], scale, rows.x[i], s0, s1);
                }
            }
#ifdef BULK
            give_back(turn, step);
#endif
        }
#ifndef BULK
        const u32 freed = scales_now;
        scales_now = scales_next, scales_next = scales_later, scales_later = freed;
#endif
        byte_now = byte_next;
        if (FOLD || BF16_ROWS) {
#pragma unroll
            for (int i = 0; i < 8; i++) acc[i / 4][i % 4] *= rows.s[0][i & 1];
        }
        if (WK > 1) {
            if (turn >= 2) barrier_wait(shared_address(&sh.empty[slot]), (turn >> 1) + 1 & 1);
            sh.part[slot][warp][0][lane] = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
            sh.part[slot][warp][1][lane] = make_float4(acc[1][0], acc[1][1], acc[1][2], acc[1][3]);
            __syncwarp();
            arrive_warp(sh.full[slot], lane);
        } else if (k.set * WM + wm < p.units) {
            if (held_picks != k.outer) picks = load_picks(p, sh.slots, row_tile, k.outer, t), held_picks = k.outer;
            finish(p, acc, row_tile, k.set * WM + wm, k.outer, picks, lane);
        }
    }
#if JOINED
    cluster_wait();
#endif
}
