// Tiles of 16-bit values in shared memory, and their fragments.
//
// A tile has rows of COLS values, COLS a multiple of 64. A chunk of 8 values (16 bytes) is stored at its column exclusive-or row % 8: the
// chunks of one column in 8 neighbouring rows then lie in different banks, so neither ldmatrix nor copies conflict.
#pragma once

#include "ptx.cuh"

constexpr i32 WARP = 32;
constexpr i32 CHUNK = 8; // values in 16 bytes

// The chunk at column fixed + chunk. With a constant `fixed`, all but its lowest bits are a constant part of the address.
template <i32 COLS> __device__ inline u32 chunk_address(u32 tile, i32 row, i32 chunk, i32 fixed = 0) {
    static_assert(COLS % 64 == 0, "the exclusive-or needs 8 chunks");
    return tile + u32(row * COLS * 2 + fixed / 8 * 128 + ((fixed % 8 + chunk) ^ (row & 7)) * 16);
}

// Rows row to row + 15 and columns col to col + 15, as operand a.
template <i32 COLS> __device__ inline void load_a(u32 (&a)[4], u32 tile, i32 row, i32 col, i32 lane) {
    ldmatrix(a, chunk_address<COLS>(tile, row + lane % 16, lane / 16, col / CHUNK));
}

// Rows row to row + 15 and columns col to col + 15 of a tile that is b transposed: b[0], b[1] of the first 8 rows, b[2], b[3] of the
// others.
template <i32 COLS> __device__ inline void load_b(u32 (&b)[4], u32 tile, i32 row, i32 col, i32 lane) {
    ldmatrix(b, chunk_address<COLS>(tile, row + lane / 16 * 8 + lane % 8, lane / 8 % 2, col / CHUNK));
}

// Rows row to row + 7 and columns col to col + 31 of such a tile: b[0], b[1] of the first 16 columns, b[2], b[3] of the others.
template <i32 COLS> __device__ inline void load_b_long(u32 (&b)[4], u32 tile, i32 row, i32 col, i32 lane) {
    ldmatrix(b, chunk_address<COLS>(tile, row + lane % 8, lane / 8, col / CHUNK));
}

// Rows row to row + 15 and columns col to col + 15 of a tile that is b: b[0], b[1] of the first 8 columns, b[2], b[3] of the others.
template <i32 COLS> __device__ inline void load_b_rows(u32 (&b)[4], u32 tile, i32 row, i32 col, i32 lane) {
    ldmatrix_transposed(b, chunk_address<COLS>(tile, row + lane % 16, lane / 16, col / CHUNK));
}

// Rows row to row + 31 and columns col to col + 7 of such a tile: b[0], b[1] of the first 16 rows, b[2], b[3] of the others.
template <i32 COLS> __device__ inline void load_b_rows_long(u32 (&b)[4], u32 tile, i32 row, i32 col, i32 lane) {
    ldmatrix_transposed(b, chunk_address<COLS>(tile, row + lane, 0, col / CHUNK));
}
