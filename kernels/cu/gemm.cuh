// What both products share: the copy of a tile of rows, and the end of a sum.
//
// A sum starts at +0 and takes k ascending, 16 at a time, in one accumulator of one thread: the order of the class. So K is never divided
// over warps, CTAs or accumulators, and a row has the same bits in every kernel, tile and batch. Zeros past k change nothing.
#pragma once

#include "mma.cuh"
#include "numerics.cuh"
#include "params/model.h"

// Starts to copy columns first_col to first_col + COLS - 1 of ROWS rows from first_row on. What is outside the matrix becomes zeros. k is a
// multiple of a chunk, so a chunk is wholly inside or outside.
template <i32 ROWS, i32 COLS, i32 THREADS>
__device__ inline void copy_rows(u32 tile, const u16 *matrix, i32 first_row, i32 rows, i32 first_col, i32 k) {
    constexpr i32 CHUNKS = COLS / CHUNK, STEP = THREADS / CHUNKS; // rows that the CTA copies at once
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "every thread copies one column of as many rows");
    const i32 row = i32(threadIdx.x) / CHUNKS, chunk = i32(threadIdx.x) % CHUNKS, col = first_col + chunk * CHUNK;
    const u16 *from = matrix + i64(first_row + row) * k + col;
#pragma unroll
    for (i32 i = 0; i < ROWS; i += STEP) {
        const bool inside = first_row + row + i < rows && col < k;
        copy_async(chunk_address<COLS>(tile, row + i, chunk), inside ? from : matrix, inside);
        from += i64(STEP) * k;
    }
}

// Stores the total of row m and column n.
template <class T> __device__ inline void store_total(const Gemm &p, i32 m, i32 n, f32 total) {
    if (m >= p.m || n >= p.n) return;
    const i64 at = i64(m) * p.n + n;
    if (p.epilogue == STORE_HALF) {
        static_cast<u16 *>(p.out)[at] = rounded<T>(p.bias ? __fadd_rn(total, p.bias[n]) : total);
    } else if (p.epilogue == ADD_RESIDUAL) {
        f32 *out = static_cast<f32 *>(p.out) + at;
        *out = __fadd_rn(*out, total);
    } else {
        static_cast<f32 *>(p.out)[at] = total;
    }
}

// Stores the activation of row m, and of column n with the column 8 behind it: gate and up. Both are rounded first, as a product stores them.
template <class T> __device__ inline void store_gated(const Gemm &p, i32 m, i32 n, f32 gate, f32 up) {
    if (m >= p.m || n >= p.n) return;
    const f32 inner = gated(widened<T>(rounded<T>(gate)), widened<T>(rounded<T>(up)));
    static_cast<u16 *>(p.out)[i64(m) * (p.n / 2) + n / 16 * 8 + n % 8] = rounded<T>(inner);
}
