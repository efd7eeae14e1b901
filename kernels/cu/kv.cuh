// Addresses in the paged pool, and copies of its tokens to shared memory.
#pragma once

#include "mma.cuh"
#include "params/model.h"

constexpr i32 BLOCK = 64;  // tokens that share a maximum
constexpr i32 SPLIT = 512; // tokens with a state of their own
constexpr i32 BLOCKS_OF_SPLIT = SPLIT / BLOCK;

// Bytes from the start of a plane to head 0 of a token.
__device__ inline i64 token_offset(const KvPlanes &kv, i32 slot, i32 token) {
    const i32 shift = 31 - __clz(kv.block_tokens);
    i32 index = token >> shift;
    // Tables of windowed groups wrap; the others are never divided.
    if (index >= kv.table_stride) index %= kv.table_stride;
    const i32 block = kv.table[i64(slot) * kv.table_stride + index];
    return i64(block) * kv.block_bytes + i64(token & (kv.block_tokens - 1)) * kv.token_bytes;
}

// The first token that a row at `position` attends to.
__device__ inline i32 first_attended(i32 position, i32 window) { return window > 0 && position >= window ? position + 1 - window : 0; }

// Starts to copy TOKENS tokens of one head from token `first` on to a tile of D columns. Tokens outside [begin, end) become zeros: neither
// the table nor the pool has anything of theirs that may be read. Columns from head_dim on become zeros too.
template <i32 TOKENS, i32 D, i32 THREADS> __device__ inline void copy_tokens(u32 tile, const u8 *plane, const KvPlanes &kv, i32 slot,
                                                                             i32 kv_head, i32 head_dim, i32 first, i32 begin, i32 end) {
    constexpr i32 CHUNKS = D / CHUNK, OWN = TOKENS * CHUNKS / THREADS, TOGETHER = OWN < 4 ? OWN : 4, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && TOKENS % STEP == 0, "every thread copies one column of as many tokens");
    const i32 row = i32(threadIdx.x) / CHUNKS, chunk = i32(threadIdx.x) % CHUNKS;
    const bool in_head = chunk * CHUNK < head_dim;
    const u8 *column = plane + i64(kv_head) * head_dim * 2 + chunk * 16;
#pragma unroll 1
    for (i32 done = 0; done < OWN; done += TOGETHER) {
        // Reads of the table do not wait for one another.
        i64 offset[TOGETHER];
        bool inside[TOGETHER];
#pragma unroll
        for (i32 i = 0; i < TOGETHER; i++) {
            const i32 token = first + row + (done + i) * STEP;
            inside[i] = in_head && token >= begin && token < end;
            offset[i] = inside[i] ? token_offset(kv, slot, token) : 0;
        }
#pragma unroll
        for (i32 i = 0; i < TOGETHER; i++) {
            copy_async(chunk_address<D>(tile, row + (done + i) * STEP, chunk), inside[i] ? column + offset[i] : plane, inside[i]);
        }
    }
}
