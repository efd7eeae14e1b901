// The random number of a draw: BLAKE3 of one record of 36 bytes, which is a single block.
#pragma once

#include "types.cuh"

__device__ inline u32 rotated_right(u32 x, u32 by) { return x >> by | x << (32 - by); }

// The quarter round of BLAKE3.
__device__ inline void mix_column(u32 &a, u32 &b, u32 &c, u32 &d, u32 x, u32 y) {
    a = a + b + x;
    d = rotated_right(d ^ a, 16);
    c = c + d;
    b = rotated_right(b ^ c, 12);
    a = a + b + y;
    d = rotated_right(d ^ a, 8);
    c = c + d;
    b = rotated_right(b ^ c, 7);
}

// The upper 53 bits of the first eight bytes (little endian) of BLAKE3 of "baton.sample.v1\0", seed, sample index and the number of tokens
// before, all little endian. The random number is this, times 2^-53.
__device__ inline u64 random_bits(u64 seed, u32 sample_index, u64 tokens) {
    constexpr u32 H0 = 0x6a09e667, H1 = 0xbb67ae85, H2 = 0x3c6ef372, H3 = 0xa54ff53a;
    constexpr u32 H4 = 0x510e527f, H5 = 0x9b05688c, H6 = 0x1f83d9ab, H7 = 0x5be0cd19;
    constexpr u32 BYTES = 36, START_END_ROOT = 1 | 2 | 8;
    // "bato" "n.sa" "mple" ".v1\0"
    u32 m[16] = {0x6f746162, 0x61732e6e, 0x656c706d, 0x0031762e, u32(seed), u32(seed >> 32), sample_index,
                 u32(tokens), u32(tokens >> 32)};
    u32 v[16] = {H0, H1, H2, H3, H4, H5, H6, H7, H0, H1, H2, H3, 0, 0, BYTES, START_END_ROOT};
#pragma unroll
    for (int round = 0; round < 7; round++) {
        mix_column(v[0], v[4], v[8], v[12], m[0], m[1]);
        mix_column(v[1], v[5], v[9], v[13], m[2], m[3]);
        mix_column(v[2], v[6], v[10], v[14], m[4], m[5]);
        mix_column(v[3], v[7], v[11], v[15], m[6], m[7]);
        mix_column(v[0], v[5], v[10], v[15], m[8], m[9]);
        mix_column(v[1], v[6], v[11], v[12], m[10], m[11]);
        mix_column(v[2], v[7], v[8], v[13], m[12], m[13]);
        mix_column(v[3], v[4], v[9], v[14], m[14], m[15]);
        const u32 next[16] = {m[2], m[6],  m[3],  m[10], m[7], m[0],  m[4],  m[13],
                              m[1], m[11], m[12], m[5],  m[9], m[14], m[15], m[8]};
#pragma unroll
        for (int i = 0; i < 16; i++) m[i] = next[i];
    }
    const u64 word = u64(v[1] ^ v[9]) << 32 | (v[0] ^ v[8]);
    return word >> 11;
}
