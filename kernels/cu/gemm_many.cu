// Products of any number of rows: out = X W^T in tiles of 128 by 128, X as operand a.
#include "gemm.cuh"

constexpr i32 THREADS = 256;
constexpr i32 ROWS = 128;             // of X and of W, in a CTA
constexpr i32 COLS = 64;              // of k, in a stage
constexpr i32 STAGES = 3;             // 96 KiB: see gemm_few.cu
constexpr i32 TILE = ROWS * COLS * 2; // bytes of one operand
// A warp has 64 rows of X and 32 of W.
constexpr i32 WARP_M = 64, WARP_N = 32, M_TILES = WARP_M / 16, N_TILES = WARP_N / 8, M_WARPS = ROWS / WARP_M;
// Tiles of X that CTAs take before they go on to the next tile of W: a wave of CTAs reads a nearly square part of both from the
// second-level cache.
constexpr i32 TILES_TOGETHER = 8;

// Stores two neighbouring columns.
template <class T> __device__ inline void store_pair(const Gemm &p, i32 m, i32 n, f32 low, f32 high) {
    // With an odd p.n the pair is not aligned.
    if (p.n % 2 != 0 || m >= p.m || n >= p.n) {
        store_total<T>(p, m, n, low);
        store_total<T>(p, m, n + 1, high);
        return;
    }
    const i64 at = i64(m) * p.n + n;
    if (p.epilogue == STORE_HALF) {
        if (p.bias) low = __fadd_rn(low, p.bias[n]), high = __fadd_rn(high, p.bias[n + 1]);
        *reinterpret_cast<u32 *>(static_cast<u16 *>(p.out) + at) = rounded_pair<T>(low, high);
        return;
    }
    float2 *out = reinterpret_cast<float2 *>(static_cast<f32 *>(p.out) + at);
    float2 total;
    total.x = low, total.y = high;
    if (p.epilogue == ADD_RESIDUAL) {
        const float2 before = *out;
        total.x = __fadd_rn(before.x, low), total.y = __fadd_rn(before.y, high);
    }
    *out = total;
}

template <class T> __device__ inline void gemm_many(const Gemm &p) {
    const u32 shared = shared_address(dynamic_shared());
    const i32 lane = i32(threadIdx.x) % WARP, warp = i32(threadIdx.x) / WARP;
    const i32 m_tiles = (p.m + ROWS - 1) / ROWS, n_tiles = (p.n + ROWS - 1) / ROWS;
    const i32 band = i32(blockIdx.x) / (TILES_TOGETHER * n_tiles), in_band = i32(blockIdx.x) % (TILES_TOGETHER * n_tiles);
    const i32 left = m_tiles - band * TILES_TOGETHER, together = left < TILES_TOGETHER ? left : TILES_TOGETHER;
    const i32 first_m = (band * TILES_TOGETHER + in_band % together) * ROWS, first_n = in_band / together * ROWS;
    const i32 warp_m = warp % M_WARPS * WARP_M, warp_n = warp / M_WARPS * WARP_N;
    const i32 steps = (p.k + COLS - 1) / COLS;
    const auto copy = [&](i32 step) {
        if (step < steps) {
            const u32 x = shared + u32(step % STAGES) * 2 * TILE, w = x + TILE;
            copy_rows<ROWS, COLS, THREADS>(x, p.x, first_m, p.m, step * COLS, p.k);
            copy_rows<ROWS, COLS, THREADS>(w, p.w, first_n, p.n, step * COLS, p.k);
        }
        // Past the end too: the count of groups tells which stage is complete.
        commit_copies();
    };

    f32 sum[M_TILES][N_TILES][4] = {};
    for (i32 step = 0; step < STAGES - 1; step++) copy(step);
    for (i32 step = 0; step < steps; step++) {
        // STAGES - 1 + step groups are closed, and the first step + 1 must be complete.
        wait_copies<STAGES - 2>();
        // All threads' copies are visible, and all warps are done with the stage before, which the next copies overwrite.
        __syncthreads();
        copy(step + STAGES - 1);
        const u32 x = shared + u32(step % STAGES) * 2 * TILE, w = x + TILE;
#pragma unroll
        for (i32 col = 0; col < COLS; col += 16) {
            u32 b[N_TILES / 2][4];
#pragma unroll
            for (i32 tile = 0; tile < N_TILES / 2; tile++) load_b<COLS>(b[tile], w, warp_n + tile * 16, col, lane);
#pragma unroll
            for (i32 row = 0; row < M_TILES; row++) {
                u32 a[4];
                load_a<COLS>(a, x, warp_m + row * 16, col, lane);
#pragma unroll
                for (i32 tile = 0; tile < N_TILES; tile++)
                    mma<T>(sum[row][tile], a, b[tile / 2][tile % 2 * 2], b[tile / 2][tile % 2 * 2 + 1]);
            }
        }
    }
#pragma unroll
    for (i32 row = 0; row < M_TILES; row++) {
#pragma unroll
        for (i32 tile = 0; tile < N_TILES; tile++) {
            const i32 m = first_m + warp_m + row * 16 + lane / 4, n = first_n + warp_n + tile * 8 + lane % 4 * 2;
            if (p.epilogue == STORE_GATED) {
                if (tile % 2 == 0) {
#pragma unroll
                    for (i32 i = 0; i < 4; i++)
                        store_gated<T>(p, m + i / 2 * 8, n + i % 2, sum[row][tile][i], sum[row][tile + 1][i]);
                }
                continue;
            }
            store_pair<T>(p, m, n, sum[row][tile][0], sum[row][tile][1]);
            store_pair<T>(p, m + 8, n, sum[row][tile][2], sum[row][tile][3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm_many_bf16(const __grid_constant__ Gemm p) { gemm_many<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm_many_f16(const __grid_constant__ Gemm p) { gemm_many<F16>(p); }
