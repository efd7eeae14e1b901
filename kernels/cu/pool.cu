// Operations on pool memory: copies of rows, and checksums.

#include "params/pool.h"

namespace {

struct alignas(16) Vector {
    u64 low, high;
};

// Where the byte at `at` of the sequence lies.
__device__ inline u64 place(const StridedRows &rows, u64 at) {
    if (rows.stride == rows.row_bytes) return rows.start + at;
    // A division of 32 bits is much faster.
    const u64 row = (at | rows.row_bytes) >> 32 == 0 ? u32(at) / u32(rows.row_bytes) : at / rows.row_bytes;
    return rows.start + row * rows.stride + (at - row * rows.row_bytes);
}

// Whether each 16 bytes of the sequence are one aligned vector.
__device__ inline bool are_vectors(const u8 *base, const StridedRows &rows) {
    return ((u64(base) + rows.start) | rows.stride | rows.row_bytes) % sizeof(Vector) == 0;
}

// Copies in units of T, by all threads of a row of the grid.
template <class T> __device__ inline void copy_units(const CopyRows &p, const RowsCopy &copy) {
    const u64 len = copy.from.row_bytes * copy.from.rows, step = u64(gridDim.x) * blockDim.x * sizeof(T);
    for (u64 at = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * sizeof(T); at < len; at += step) {
        *reinterpret_cast<T *>(p.to + place(copy.to, at)) = *reinterpret_cast<const T *>(p.from + place(copy.from, at));
    }
}

constexpr u32 CHUNK_BYTES = 1024;
constexpr u32 WORDS = 4;                       // of a lane: 32 lanes have the 128 words of a chunk
constexpr u32 WARPS_OF_SUM = 8;

// The finalizer of SplitMix64.
__device__ inline u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

__device__ inline u64 sum_of_warp(u64 x) {
    for (u32 apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

// The word of the sequence at `at`, the bytes behind its end as zeros.
__device__ inline u64 word_of(const u8 *pool, const StridedRows &rows, u64 len, u64 at) {
    u64 word = 0;
    for (u32 i = 0; i < 8 && at + i < len; i++) word |= u64(pool[place(rows, at + i)]) << (8 * i);
    return word;
}

} // namespace

// Row y of the grid has the copies y, y + gridDim.y, and so on.
extern "C" __global__ void __launch_bounds__(256) copy_rows(CopyRows p) {
    for (i32 i = blockIdx.y; i < p.count; i += gridDim.y) {
        const RowsCopy copy = p.copies[i];
        if (are_vectors(p.from, copy.from) && are_vectors(p.to, copy.to)) {
            copy_units<Vector>(p, copy);
        } else {
            copy_units<u8>(p, copy);
        }
    }
}

// A CTA has whole lists, a warp whole chunks of them: chunks enter the sum by addition.
extern "C" __global__ void __launch_bounds__(256) sum_rows(SumRows p) {
    __shared__ u64 sums[WARPS_OF_SUM];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 keys[WORDS];
#pragma unroll
    for (u32 i = 0; i < WORDS; i++) {
        const u32 word = lane * 2 + i % 2 + i / 2 * 64;
        keys[i] = mix(0x9e3779b97f4a7c15ull * (word + 1));
    }
    for (i32 list = blockIdx.x; list < p.count; list += gridDim.x) {
        const StridedRows rows = p.lists[list];
        const u64 len = rows.row_bytes * rows.rows;
        const bool vectors = are_vectors(p.pool, rows);
        u64 sum = 0;
        for (u64 chunk = warp; chunk * CHUNK_BYTES < len; chunk += WARPS_OF_SUM) {
            // A lane has two pairs of neighbouring words.
            u64 words[WORDS];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u64 at = chunk * CHUNK_BYTES + half * (CHUNK_BYTES / 2) + lane * sizeof(Vector);
                if (vectors) {
                    // Rows of whole vectors: the sequence ends with one.
                    Vector vector = {0, 0};
                    if (at < len) vector = *reinterpret_cast<const Vector *>(p.pool + place(rows, at));
                    words[2 * half] = vector.low;
                    words[2 * half + 1] = vector.high;
                } else {
                    words[2 * half] = word_of(p.pool, rows, len, at);
                    words[2 * half + 1] = word_of(p.pool, rows, len, at + 8);
                }
            }
            u64 nh = 0, plain = 0;
#pragma unroll
            for (u32 i = 0; i < WORDS; i++) {
                const u32 low = u32(words[i]) + u32(keys[i]), high = u32(words[i] >> 32) + u32(keys[i] >> 32);
                nh += u64(low) * high;
                plain += words[i];
            }
            nh = sum_of_warp(nh);
            plain = sum_of_warp(plain);
            sum += mix(nh + mix(plain + chunk));
        }
        __syncthreads(); // the sums of the list before may still be read
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 total = len;
            for (u32 i = 0; i < WARPS_OF_SUM; i++) total += sums[i];
            p.sums[list] = mix(total);
        }
    }
}
