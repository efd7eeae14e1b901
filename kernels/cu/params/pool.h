// Arguments of operations on pool memory, which see bytes.
#pragma once

#include "../types.cuh"

// `rows` rows of `row_bytes` bytes, one every `stride` bytes. Their bytes count as one sequence, row after row.
struct StridedRows {
    u64 start, row_bytes, stride, rows;
};

// The bytes of rows, copied to other rows of as many bytes that do not overlap them. The shapes may differ.
struct RowsCopy {
    StridedRows from, to;
};

// Copies rows: within the pool, from the pool to dense memory, or back.
struct CopyRows {
    const u8 *from;
    u8 *to;
    const RowsCopy *copies; // [count]
    i32 count, reserved;
};

// Checksums by algorithm 1 of memory/src/checksum.rs.
struct SumRows {
    const u8 *pool;
    const StridedRows *lists; // [count]
    u64 *sums;                // [count]
    i32 count, reserved;
};
