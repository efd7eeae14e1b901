// Known answers: what the instructions under the numerics classes return, for the host to compare.
//
// Generated from kernels/src/cuda/arguments: change it there.
#pragma once

#include "../types.cuh"

// out[i] = op(x[i], y[i], z[i]); operands that an operation does not take may be null.
struct KnownF32 {
    const f32 *x, *y, *z;
    u32 *out; // bits
    i32 count, reserved;
};

struct KnownF64 {
    const f64 *x, *y;
    const u64 *n;
    u64 *out; // bits
    i32 count, reserved;
};

// d[m][n] = c[m][n] + dot(a[m], b[n]) for each tile, k ascending by 16.
struct KnownTiles {
    const u16 *a; // T [tiles, m, k]; m is 16 for mma.sync, 64 for wgmma
    const u16 *b; // T [tiles, 8, k]
    const f32 *c; // [tiles, m, 8]
    f32 *d; // [tiles, m, 8]
    i32 tiles;
    i32 k;
};
static_assert(sizeof(KnownTiles) == 40, "as the host lays it out");
