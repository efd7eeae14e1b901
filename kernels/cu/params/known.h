// Known answers: what the instructions under the numerics classes return, for the host to compare.
//
// Generated from kernels/src/cuda/arguments: change it there.
#pragma once

#include "../types.cuh"

enum KnownOperation {
    KNOWN_ADD = 0,
    KNOWN_SUB = 1,
    KNOWN_MUL = 2,
    KNOWN_FMA = 3,
    KNOWN_DIV = 4,
    KNOWN_SQRT = 5,
    KNOWN_LARGER = 6,
    KNOWN_TO_BF16 = 7,
    KNOWN_TO_F16 = 8,
    KNOWN_TO_BF16_PAIR = 9,
    KNOWN_TO_F16_PAIR = 10,
    KNOWN_OF_BF16 = 11,
    KNOWN_OF_F16 = 12,
    KNOWN_TO_I32 = 13,
    KNOWN_OF_I32 = 14,
    KNOWN_OF_U32 = 15,
    KNOWN_EXP = 16,
    KNOWN_EXP2 = 17,
    KNOWN_SHARE_EXP = 18,
    KNOWN_SHARE = 19,
    KNOWN_ORDERED = 20,
    KNOWN_PART = 21,
    KNOWN_OF_U64 = 22,
    KNOWN_RANDOM = 23,
};

// An operation with its operands. Numbers of 32 bits are in the lower halves of a and b.
struct KnownCase {
    u64 a;
    u64 b;
    u32 c;
    u32 operation;
};
static_assert(sizeof(KnownCase) == 24, "as the host lays it out");

// answers[i] = the bits of cases[i]
struct KnownCases {
    const KnownCase *cases; // [count]
    u64 *answers; // [count]
    i32 count;
    i32 reserved;
};
static_assert(sizeof(KnownCases) == 24, "as the host lays it out");

// d[m][n] = c[m][n] + dot(a[m], b[n]) for each tile, k ascending by 16.
struct KnownTiles {
    const u16 *a; // T [tiles, 16, k]
    const u16 *b; // T [tiles, 8, k]
    const f32 *c; // [tiles, 16, 8]
    f32 *d; // [tiles, 16, 8]
    i32 tiles;
    i32 k;
};
static_assert(sizeof(KnownTiles) == 40, "as the host lays it out");
