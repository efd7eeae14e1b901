// Products of up to 128 rows: out = X W^T, bound by the reading of W once.
//
// W is operand a and X operand b, so an instruction has as few as 8 rows of X, and 16 rows of W suffice for a CTA: narrow tiles keep every
// SM reading when n is small. A ring of stages in shared memory has the next columns of W and X under way.
#include "gemm.cuh"

constexpr i32 THREADS = 128, WARPS = THREADS / WARP;
constexpr i32 SHARED_MAX = 96 * 1024; // fits 99 KiB of a CTA on sm_86, sm_89 and sm_120, and twice into an SM of sm_90

// N rows of W, at most M rows of X.
template <i32 N, i32 M> struct Shape {
    static constexpr i32 COLS = M <= 32 ? 128 : 64;  // of k, in a stage
    static constexpr i32 STAGE = (N + M) * COLS * 2; // bytes
    static constexpr i32 STAGES = SHARED_MAX / STAGE < 8 ? SHARED_MAX / STAGE : 8;
    // Rows of a warp. With many rows of X, square tiles save reads of shared memory.
    static constexpr i32 N_TILES = M >= 64 && N >= 32 ? 2 : 1;
    static constexpr i32 N_WARPS = N / 16 / N_TILES < WARPS ? N / 16 / N_TILES : WARPS;
    static constexpr i32 M_WARPS = WARPS / N_WARPS;
    static constexpr i32 M_TILES = M / 8 > M_WARPS ? M / 8 / M_WARPS : 1;
    static_assert(N == N_WARPS * N_TILES * 16, "the warps have all rows of W");
    static_assert(M_TILES == 1 || M_TILES % 2 == 0, "tiles of X are loaded in pairs");
};

// Of 32 columns: operands of two instructions for each tile of the warp.
template <class S> struct Fragments {
    u32 a[2][S::N_TILES][4];
    u32 b[2][S::M_TILES][2];
};

template <class S> __device__ inline void load(Fragments<S> &of, u32 w, u32 x, i32 warp_n, i32 warp_m, i32 col, i32 lane) {
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
#pragma unroll
        for (i32 row = 0; row < S::N_TILES; row++) load_a<S::COLS>(of.a[half][row], w, warp_n + row * 16, col + half * 16, lane);
    }
    if constexpr (S::M_TILES == 1) {
        u32 r[4];
        load_b_long<S::COLS>(r, x, warp_m, col, lane);
        of.b[0][0][0] = r[0], of.b[0][0][1] = r[1], of.b[1][0][0] = r[2], of.b[1][0][1] = r[3];
    } else {
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
#pragma unroll
            for (i32 tile = 0; tile < S::M_TILES; tile += 2) {
                u32 r[4];
                load_b<S::COLS>(r, x, warp_m + tile * 8, col + half * 16, lane);
                of.b[half][tile][0] = r[0], of.b[half][tile][1] = r[1], of.b[half][tile + 1][0] = r[2], of.b[half][tile + 1][1] = r[3];
            }
        }
    }
}

// With few rows the chain of dependent instructions is the longest path, so nothing else may stand in it: the fragments of the next columns
// are loaded before the products of these, across stages too.
template <class T, i32 N, i32 M> __device__ inline void gemm_few(const Gemm &p) {
    using S = Shape<N, M>;
    constexpr i32 PARTS = S::COLS / 32; // of a stage
    static_assert(PARTS % 2 == 0, "a stage starts with the first of two sets of fragments");
    const u32 shared = shared_address(dynamic_shared());
    const i32 lane = i32(threadIdx.x) % WARP, warp = i32(threadIdx.x) / WARP;
    const i32 first_n = i32(blockIdx.x) * N;
    const i32 warp_n = warp % S::N_WARPS * S::N_TILES * 16, warp_m = warp / S::N_WARPS * S::M_TILES * 8;
    const bool has_tile = warp_m < M; // few rows of X are fewer tiles than warps
    const i32 steps = (p.k + S::COLS - 1) / S::COLS;
    const auto w_of = [&](i32 step) { return shared + u32(step % S::STAGES) * S::STAGE; };
    const auto x_of = [&](i32 step) { return w_of(step) + N * S::COLS * 2; };
    const auto copy = [&](i32 step) {
        if (step < steps) {
            copy_rows<N, S::COLS, THREADS>(w_of(step), p.w, first_n, p.n, step * S::COLS, p.k);
            copy_rows<M, S::COLS, THREADS>(x_of(step), p.x, 0, p.m, step * S::COLS, p.k);
        }
        // Past the end too: the count of groups tells which stage is complete.
        commit_copies();
    };

    f32 sum[S::N_TILES][S::M_TILES][4] = {};
    Fragments<S> of[2];
    for (i32 step = 0; step < S::STAGES; step++) copy(step);
    wait_copies<S::STAGES - 1>();
    __syncthreads();
    if (has_tile) load(of[0], w_of(0), x_of(0), warp_n, warp_m, 0, lane);
    for (i32 step = 0; step < steps; step++) {
#pragma unroll
        for (i32 part = 0; part < PARTS; part++) {
            const bool last = part + 1 == PARTS;
            if (last) {
                // STAGES + step groups are closed, and the first step + 2 must be complete. After the barrier the next stage is visible to
                // all warps, and all have loaded the last of this one.
                wait_copies<S::STAGES - 2>();
                __syncthreads();
            }
            // Behind the last stage there is none.
            const i32 next = last ? step + 1 : step;
            if (has_tile && next < steps) load(of[(part + 1) % 2], w_of(next), x_of(next), warp_n, warp_m, (part + 1) % PARTS * 32, lane);
            if (has_tile) {
#pragma unroll
                for (i32 half = 0; half < 2; half++) {
#pragma unroll
                    for (i32 row = 0; row < S::N_TILES; row++) {
#pragma unroll
                        for (i32 tile = 0; tile < S::M_TILES; tile++) {
                            mma<T>(sum[row][tile], of[part % 2].a[half][row], of[part % 2].b[half][tile][0], of[part % 2].b[half][tile][1]);
                        }
                    }
                }
            }
            // In place of this stage.
            if (last) copy(step + S::STAGES);
        }
    }
    if (!has_tile) return;
#pragma unroll
    for (i32 row = 0; row < S::N_TILES; row++) {
#pragma unroll
        for (i32 tile = 0; tile < S::M_TILES; tile++) {
#pragma unroll
            for (i32 i = 0; i < 2; i++) {
                // Rows of the sum are rows of W; a thread has two that lie 8 apart.
                const i32 n = first_n + warp_n + row * 16 + lane / 4, m = warp_m + tile * 8 + lane % 4 * 2 + i;
                if (p.epilogue == STORE_GATED) {
                    store_gated<T>(p, m, n, sum[row][tile][i], sum[row][tile][i + 2]);
                } else {
                    store_total<T>(p, m, n, sum[row][tile][i]);
                    store_total<T>(p, m, n + 8, sum[row][tile][i + 2]);
                }
            }
        }
    }
}

#define KERNEL(name, T, N, M)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) gemm_few_##name##_n##N##_m##M(const __grid_constant__ Gemm p) {                  \
        gemm_few<T, N, M>(p);                                                                                                              \
    }
#define KERNELS_OF_ROWS(name, T, M) KERNEL(name, T, 16, M) KERNEL(name, T, 32, M) KERNEL(name, T, 64, M)
#define KERNELS(name, T)                                                                                                                   \
    KERNELS_OF_ROWS(name, T, 8)                                                                                                            \
    KERNELS_OF_ROWS(name, T, 16) KERNELS_OF_ROWS(name, T, 32) KERNELS_OF_ROWS(name, T, 64) KERNELS_OF_ROWS(name, T, 128)
KERNELS(bf16, Bf16)
KERNELS(f16, F16)
