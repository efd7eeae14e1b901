// Operations on pool memory, which see bytes.
//
// Generated from kernels/src/cuda/arguments: change it there.
#pragma once

#include "../types.cuh"

// `rows` rows of `row_bytes` bytes, one every `stride` bytes. Their bytes count as one sequence, row after row.
struct StridedRows {
    u64 start;
    u64 row_bytes;
    u64 stride;
    u64 rows;
};
static_assert(sizeof(StridedRows) == 32, "as the host lays it out");

// The bytes of rows, copied to other rows of as many bytes that do not overlap them. The shapes may differ.
struct RowsCopy {
    StridedRows from;
    StridedRows to;
};
static_assert(sizeof(RowsCopy) == 64, "as the host lays it out");

// Copies rows: within the pool, from the pool to dense memory, or back.
struct CopyRows {
    const u8 *from;
    u8 *to;
    const RowsCopy *copies; // [count]
    i32 count;
    i32 reserved;
};
static_assert(sizeof(CopyRows) == 32, "as the host lays it out");

// Checksums by algorithm 1 of memory/src/checksum.rs.
struct SumRows {
    const u8 *pool;
    const StridedRows *lists; // [count]
    u64 *sums; // [count]
    i32 count;
    i32 reserved;
};
static_assert(sizeof(SumRows) == 32, "as the host lays it out");
