// Attention of the rows of a chunk. One CTA has one tile of rows of one sequence, and the query heads of one KV head.
//
// The rows of its products are pairs packed as row * group + head of the group: ROWS of them at most. So the host cuts the rows of a
// sequence into tiles of at most ROWS / group (rounded down) neighbouring rows. Each warp has 16 packed rows, and the columns of O or, with
// D = 256, half of them: then two warps compute the same scores, since O and its running sum of all columns would not fit into registers.
//
// Blocks are taken in order, and each one's keys and values are tiles of a ring in shared memory: keys, values, keys, ...
#include "kv.cuh"
#include "numerics.cuh"
#include "ring.cuh"

constexpr i32 THREADS = 256, WARPS = THREADS / WARP;

// D: head_dim rounded up to 64, 128 or 256.
template <i32 D> struct Shape {
    static constexpr i32 D_WARPS = D > 128 ? D / 128 : 1;
    static constexpr i32 ROWS = WARPS / D_WARPS * 16; // packed
    static constexpr i32 COLS = D / D_WARPS;          // of O, in a warp
    static constexpr i32 TILES = D > 128 ? 2 : 4;     // of the ring: with q 96 KiB at most, see gemm_few.cu
    static constexpr i32 TILE = BLOCK * D * 2;        // bytes
};

// States of two rows, `group` and `group + 8` of a warp's 16. Of the eight lanes of a sum, a thread has those of its columns of scores:
// 2 third and 2 third + 1.
template <i32 O_TILES> struct OfSplit {
    f32 max[2] = {minus_infinity(), minus_infinity()};
    f32 lanes[2][2] = {};
    f32 o[O_TILES][4] = {};
};
template <i32 O_TILES> struct OfAll {
    f32 max[2] = {minus_infinity(), minus_infinity()};
    f32 sum[2] = {};
    f32 o[O_TILES][4] = {};
};

template <class T, i32 D> __device__ inline void attend_prefill(const Attend &p) {
    using S = Shape<D>;
    constexpr i32 O_TILES = S::COLS / 8, S_TILES = BLOCK / 8;
    const i32 slot = p.tiles[4 * blockIdx.x], first_row = p.tiles[4 * blockIdx.x + 1], rows = p.tiles[4 * blockIdx.x + 2];
    const i32 position = p.tiles[4 * blockIdx.x + 3];
    if (slot < 0 || rows <= 0) return;
    const i32 lane = i32(threadIdx.x) % WARP, warp = i32(threadIdx.x) / WARP;
    const i32 kv_head = i32(blockIdx.y), group = p.heads / p.kv_heads, packed = rows * group;
    const i32 warp_row = warp / S::D_WARPS * 16, warp_col = warp % S::D_WARPS * S::COLS;
    const u32 q = shared_address(dynamic_shared());
    // The tokens that any row attends to, and the blocks with any of them.
    const i32 begin = first_attended(position, p.window), end = position + rows, last_begin = first_attended(end - 1, p.window);
    const i32 first_block = begin / BLOCK, blocks = (end - 1) / BLOCK - first_block + 1;

    const auto ring = ring_of<S::TILES, S::TILE>(q + S::ROWS * D * 2, 2 * blocks, [&](i32 tile, u32 to) {
        const i32 first = (first_block + tile / 2) * BLOCK;
        copy_tokens<BLOCK, D, THREADS>(to, tile % 2 ? p.kv.v : p.kv.k, p.kv, slot, kv_head, p.head_dim, first, begin, end);
    });

    // With the first tile.
#pragma unroll
    for (i32 i = 0; i < S::ROWS * (D / CHUNK) / THREADS; i++) {
        const i32 at = i32(threadIdx.x) + i * THREADS, row = at / (D / CHUNK), chunk = at % (D / CHUNK);
        const bool inside = row < packed && chunk * CHUNK < p.head_dim;
        const u16 *from = p.q;
        if (inside) from += i64(first_row + row / group) * p.q_stride + (kv_head * group + row % group) * p.head_dim + chunk * CHUNK;
        copy_async(chunk_address<D>(q, row, chunk), from, inside);
    }
    ring.start();

    // The tokens [low, high) that this thread's rows attend to: none for rows past the tile's.
    i32 low[2], high[2];
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const i32 row = warp_row + half * 8 + lane / 4, at = position + row / group;
        low[half] = row < packed ? first_attended(at, p.window) : 0;
        high[half] = row < packed ? at + 1 : 0;
    }
    OfAll<O_TILES> all;
    i32 at = 0; // block, counted from the first
    while (at < blocks) {
        const i32 split = (first_block + at) / BLOCKS_OF_SPLIT * SPLIT, after = split + SPLIT;
        const i32 to = min(blocks, after / BLOCK - first_block);
        OfSplit<O_TILES> of;
        for (; at < to; at++) {
            const i32 first = (first_block + at) * BLOCK;
            const u32 k = ring.arrived(2 * at);
            f32 s[S_TILES][4] = {};
#pragma unroll 2 // all of it takes too many registers
            for (i32 col = 0; col < D; col += 16) {
                u32 a[4];
                load_a<D>(a, q, warp_row, col, lane);
#pragma unroll
                for (i32 tile = 0; tile < S_TILES; tile += 2) {
                    u32 b[4];
                    load_b<D>(b, k, tile * 8, col, lane);
                    mma<T>(s[tile], a, b[0], b[1]);
                    mma<T>(s[tile + 1], a, b[2], b[3]);
                }
            }
            // Element i of s is of row half = i / 2, and of token first + tile * 8 + 2 third + i % 2. A token that its row does not attend
            // to counts as minus infinity, which has no part in a maximum and the weight +0.
            if (first < last_begin || first + BLOCK > position + 1) {
#pragma unroll
                for (i32 tile = 0; tile < S_TILES; tile++) {
#pragma unroll
                    for (i32 i = 0; i < 4; i++) {
                        const i32 token = first + tile * 8 + lane % 4 * 2 + i % 2;
                        if (token < low[i / 2] || token >= high[i / 2]) s[tile][i] = minus_infinity();
                    }
                }
            }
            f32 a[2];
#pragma unroll
            for (i32 half = 0; half < 2; half++) {
                f32 max = of.max[half];
#pragma unroll
                for (i32 tile = 0; tile < S_TILES; tile++) {
#pragma unroll
                    for (i32 i = 2 * half; i < 2 * half + 2; i++) max = max_or_nan(max, s[tile][i]);
                }
                // The four threads of the row.
                max = max_or_nan(max, __shfl_xor_sync(~0u, max, 1));
                max = max_or_nan(max, __shfl_xor_sync(~0u, max, 2));
                a[half] = block_decay(of.max[half], max, p.factor);
                of.max[half] = max;
                // A row that attends to nothing here may not have a maximum yet: infinity less infinity would be NaN, and no weight of +0.
                // If a row attends to something and still has none, all is NaN, as written.
                const bool attends = first < high[half] && first + BLOCK > low[half];
                const f32 top = attends ? -__fmul_rn(max, p.factor) : 0.0f;
#pragma unroll
                for (i32 tile = 0; tile < S_TILES; tile++) {
#pragma unroll
                    for (i32 i = 2 * half; i < 2 * half + 2; i++) {
                        const f32 w = weight(s[tile][i], p.factor, top);
                        f32 &sum = of.lanes[half][i % 2];
                        sum = tile == 0 ? __fmaf_rn(sum, a[half], w) : __fadd_rn(sum, w);
                        s[tile][i] = w;
                    }
                }
            }
#pragma unroll
            for (i32 tile = 0; tile < O_TILES; tile++) {
#pragma unroll
                for (i32 i = 0; i < 4; i++) of.o[tile][i] = __fmul_rn(of.o[tile][i], a[i / 2]);
            }

            const u32 v = ring.arrived(2 * at + 1) + warp_col * 2; // whole runs of 8 chunks
#pragma unroll
            for (i32 token = 0; token < BLOCK; token += 16) {
                // Two tiles of weights, side by side, are operand a.
                const f32(&left)[4] = s[token / 8], (&right)[4] = s[token / 8 + 1];
                const u32 w[4] = {rounded_pair<T>(left[0], left[1]), rounded_pair<T>(left[2], left[3]), rounded_pair<T>(right[0], right[1]),
                                  rounded_pair<T>(right[2], right[3])};
#pragma unroll
                for (i32 tile = 0; tile < O_TILES; tile += 2) {
                    u32 b[4];
                    load_b_rows<D>(b, v, token, tile * 8, lane);
                    mma<T>(of.o[tile], w, b[0], b[1]);
                    mma<T>(of.o[tile + 1], w, b[2], b[3]);
                }
            }
        }

        // The split joins those before, for rows that attend to a token of it. For the first of a row the running state is empty, and
        // a = 0, b = 1 give the split itself: no O is -0, since a zero of the tensor cores is +0.
        f32 l[2];
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            f32 sum[2];
#pragma unroll
            for (i32 odd = 0; odd < 2; odd++) {
                sum[odd] = of.lanes[half][odd];                                    // lane 2 third + odd
                sum[odd] = __fadd_rn(sum[odd], __shfl_xor_sync(~0u, sum[odd], 2)); // 0 + 4 and 2 + 6, or 1 + 5 and 3 + 7
                sum[odd] = __fadd_rn(sum[odd], __shfl_xor_sync(~0u, sum[odd], 1));
            }
            l[half] = __fadd_rn(sum[0], sum[1]);
        }
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            if (low[half] >= after || high[half] <= split) continue;
            const f32 max = max_or_nan(all.max[half], of.max[half]);
            const f32 a = decay(all.max[half], max, p.factor), b = decay(of.max[half], max, p.factor);
            all.max[half] = max;
            all.sum[half] = __fmaf_rn(l[half], b, __fmul_rn(all.sum[half], a));
#pragma unroll
            for (i32 tile = 0; tile < O_TILES; tile++) {
#pragma unroll
                for (i32 i = 2 * half; i < 2 * half + 2; i++) {
                    all.o[tile][i] = __fmaf_rn(of.o[tile][i], b, __fmul_rn(all.o[tile][i], a));
                }
            }
        }
    }

#pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const i32 row = warp_row + half * 8 + lane / 4;
        if (row >= packed) continue;
        const f32 r = __fdiv_rn(1.0f, all.sum[half]);
        u16 *out = p.out + (i64(first_row + row / group) * p.heads + kv_head * group + row % group) * p.head_dim;
#pragma unroll
        for (i32 tile = 0; tile < O_TILES; tile++) {
            const i32 col = warp_col + tile * 8 + lane % 4 * 2;
            if (col >= p.head_dim) continue;
            *reinterpret_cast<u32 *>(out + col) =
                rounded_pair<T>(__fmul_rn(all.o[tile][2 * half], r), __fmul_rn(all.o[tile][2 * half + 1], r));
        }
    }
}

#define KERNEL(name, T, D)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) attend_prefill_##name##_d##D(const __grid_constant__ Attend p) {                 \
        attend_prefill<T, D>(p);                                                                                                           \
    }
KERNEL(bf16, Bf16, 64)
KERNEL(bf16, Bf16, 128)
KERNEL(bf16, Bf16, 256)
KERNEL(f16, F16, 64)
KERNEL(f16, F16, 128)
KERNEL(f16, F16, 256)
