// A ring of tiles in shared memory, filled ahead of their use by copies that do not wait.
#pragma once

#include "ptx.cuh"

// SLOTS tiles of BYTES bytes each from `at` on. `load(tile, address)` starts a thread's copies of a tile.
template <i32 SLOTS, i32 BYTES, class Load> struct Ring {
    const u32 at;
    const i32 tiles; // that there are in all
    const Load load;

    __device__ inline u32 slot_of(i32 tile) const { return at + u32(tile % SLOTS) * BYTES; }

    // Starts with the first tiles. Copies that were started before belong to the first one.
    __device__ inline void start() const {
        for (i32 tile = 0; tile < SLOTS - 1; tile++) copy(tile);
    }

    // Where a tile is. All threads call it for every tile in order, and are then done with the tile before.
    __device__ inline u32 arrived(i32 tile) const {
        // SLOTS - 1 + tile groups are closed, and the first tile + 1 must be complete.
        wait_copies<SLOTS - 2>();
        // All threads' copies are visible, and all warps are done with the tile before, which the next copies overwrite.
        __syncthreads();
        copy(tile + SLOTS - 1);
        return slot_of(tile);
    }

    __device__ inline void copy(i32 tile) const {
        if (tile < tiles) load(tile, slot_of(tile));
        // Past the end too: the count of groups tells which tile is complete.
        commit_copies();
    }
};

template <i32 SLOTS, i32 BYTES, class Load> __device__ inline Ring<SLOTS, BYTES, Load> ring_of(u32 at, i32 tiles, const Load &load) {
    return Ring<SLOTS, BYTES, Load>{at, tiles, load};
}
