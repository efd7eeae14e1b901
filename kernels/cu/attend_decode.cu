// Attention of single rows, each with all of its sequence. One CTA has one split of one row, and up to 16 query heads of one KV head as the
// rows of its products. Bound by the reading of keys and values, so it has three parts:
//
// 1. Scores of all tokens of the split, to shared memory. They need no order, so keys stream through a ring of tiles.
// 2. Maxima of the blocks, then weights, while the first values are under way.
// 3. O and the sums of weights in the order of the tokens. Each warp has some columns of O.
//
// The bits are those of attend_prefill.
#include "kv.cuh"
#include "numerics.cuh"
#include "ring.cuh"

constexpr i32 THREADS = 256, WARPS = THREADS / WARP;
constexpr i32 ROWS = 16;          // query heads
constexpr i32 STRIDE = SPLIT + 8; // floats in a row of scores; 8 beside a multiple of the banks: rows 0 to 3 of a fragment differ in banks

// D: head_dim rounded up to 64, 128 or 256.
template <i32 D> struct Shape {
    static constexpr i32 TOKENS = D > 128 ? 32 : 64; // of a tile
    static constexpr i32 TILE = TOKENS * D * 2;      // bytes
    static constexpr i32 TILES = D > 64 ? 3 : 4;     // of the ring: two or three CTAs fit into an SM of sm_90, and one into 99 KiB
    static constexpr i32 COLS = D / WARPS;           // of O, in a warp
};

// Behind q and the ring in shared memory.
struct Softmax {
    f32 scores[ROWS][STRIDE]; // then weights
    f32 decay[BLOCKS_OF_SPLIT][ROWS];
    f32 max[ROWS], sum[ROWS];
};

template <class T, i32 D> __device__ inline void attend_decode(const Attend &p) {
    using S = Shape<D>;
    constexpr i32 O_TILES = S::COLS / 8, TILES_OF_BLOCK = BLOCK / S::TOKENS;
    const i32 row = i32(blockIdx.z), slot = p.slots[row];
    if (slot < 0) return;
    const i32 position = p.positions[row], first_token = first_attended(position, p.window);
    const i32 first_split = first_token / SPLIT, last_split = position / SPLIT, split = first_split + i32(blockIdx.x);
    if (split > last_split) return;
    const i32 lane = i32(threadIdx.x) % WARP, warp = i32(threadIdx.x) / WARP;
    const i32 group = p.heads / p.kv_heads, parts = (group + ROWS - 1) / ROWS; // of a group, each with up to 16 heads
    const i32 kv_head = i32(blockIdx.y) / parts, first_in_group = i32(blockIdx.y) % parts * ROWS;
    const i32 first_head = kv_head * group + first_in_group, heads = group - first_in_group < ROWS ? group - first_in_group : ROWS;
    // The tokens [begin, end) of the split that the row attends to, and their blocks.
    const i32 begin = first_token > split * SPLIT ? first_token : split * SPLIT;
    const i32 end = position < (split + 1) * SPLIT ? position + 1 : (split + 1) * SPLIT;
    const i32 first_block = begin / BLOCK, blocks = (end - 1) / BLOCK - first_block + 1, tiles = blocks * TILES_OF_BLOCK;

    u8 *const shared = dynamic_shared();
    const u32 q = shared_address(shared);
    Softmax &of = *reinterpret_cast<Softmax *>(shared + ROWS * D * 2 + S::TILES * S::TILE);

    // All tiles of keys, then all tiles of values.
    const auto ring = ring_of<S::TILES, S::TILE>(q + ROWS * D * 2, 2 * tiles, [&](i32 tile, u32 to) {
        const bool keys = tile < tiles;
        const i32 first = first_block * BLOCK + (keys ? tile : tile - tiles) * S::TOKENS;
        copy_tokens<S::TOKENS, D, THREADS>(to, keys ? p.kv.k : p.kv.v, p.kv, slot, kv_head, p.head_dim, first, begin, end);
    });

    // With the first tile. Rows past the heads are zeros.
    for (i32 at = i32(threadIdx.x); at < ROWS * (D / CHUNK); at += THREADS) {
        const i32 head = at / (D / CHUNK), chunk = at % (D / CHUNK);
        const bool inside = head < heads && chunk * CHUNK < p.head_dim;
        const u16 *from = p.q;
        if (inside) from += i64(row) * p.q_stride + (first_head + head) * p.head_dim + chunk * CHUNK;
        copy_async(chunk_address<D>(q, head, chunk), from, inside);
    }
    ring.start();

    // Scores: a warp has 8 tokens of a tile.
    for (i32 tile = 0; tile < tiles; tile++) {
        const u32 k = ring.arrived(tile);
        if (warp * 8 >= S::TOKENS) continue;
        f32 s[4] = {};
#pragma unroll
        for (i32 col = 0; col < D; col += 32) {
            u32 b[4], a[4];
            load_b_long<D>(b, k, warp * 8, col, lane);
            load_a<D>(a, q, 0, col, lane);
            mma<T>(s, a, b[0], b[1]);
            load_a<D>(a, q, 0, col + 16, lane);
            mma<T>(s, a, b[2], b[3]);
        }
        const i32 at = tile * S::TOKENS + warp * 8 + lane % 4 * 2;
#pragma unroll
        for (i32 i = 0; i < 4; i++) of.scores[lane / 4 + i / 2 * 8][at + i % 2] = s[i];
    }
    __syncthreads();

    // Weights: 16 threads have a head, and each of them 4 tokens of a block. Rows past the heads are left as they are: they have no result.
    if (warp * 2 < heads) {
        const i32 head = i32(threadIdx.x) / 16, first = i32(threadIdx.x) % 16;
        f32 *scores = of.scores[head];
        const auto attended = [&](i32 at) {
            const i32 token = first_block * BLOCK + at;
            return token >= begin && token < end;
        };
        f32 of_block[BLOCKS_OF_SPLIT];
#pragma unroll
        for (i32 block = 0; block < BLOCKS_OF_SPLIT; block++) {
            f32 max = minus_infinity();
            if (block < blocks) {
#pragma unroll
                for (i32 at = block * BLOCK; at < (block + 1) * BLOCK; at += 16) {
                    if (attended(at + first)) max = max_or_nan(max, scores[at + first]);
                }
            }
#pragma unroll
            for (i32 step = 8; step > 0; step /= 2) max = max_or_nan(max, __shfl_xor_sync(~0u, max, step));
            of_block[block] = max;
        }
        f32 before = minus_infinity();
#pragma unroll
        for (i32 block = 0; block < BLOCKS_OF_SPLIT; block++) {
            if (block >= blocks) continue;
            const f32 max = max_or_nan(before, of_block[block]), top = -__fmul_rn(max, p.factor);
            if (first == 0) of.decay[block][head] = block_decay(before, max, p.factor);
#pragma unroll
            for (i32 at = block * BLOCK; at < (block + 1) * BLOCK; at += 16) {
                scores[at + first] = attended(at + first) ? weight(scores[at + first], p.factor, top) : 0.0f;
            }
            before = max;
        }
        if (first == 0) of.max[head] = before;
    }

    // The barrier of the first values stands between the weights and their use. A thread of the first four warps has lane `lane_of_sum` of
    // the sum of one head.
    const bool sums = threadIdx.x < ROWS * 8;
    const i32 head_of_sum = i32(threadIdx.x) / 8 % ROWS, lane_of_sum = i32(threadIdx.x) % 8;
    f32 sum = 0.0f;
    f32 o[O_TILES][4] = {};
    for (i32 tile = 0; tile < tiles; tile++) {
        const u32 v = ring.arrived(tiles + tile);
        if (tile % TILES_OF_BLOCK == 0) {
            const f32 a[2] = {of.decay[tile / TILES_OF_BLOCK][lane / 4], of.decay[tile / TILES_OF_BLOCK][lane / 4 + 8]};
#pragma unroll
            for (i32 col = 0; col < O_TILES; col++) {
#pragma unroll
                for (i32 i = 0; i < 4; i++) o[col][i] = __fmul_rn(o[col][i], a[i / 2]);
            }
            if (sums) {
                const f32 *w = &of.scores[head_of_sum][tile * S::TOKENS + lane_of_sum];
                sum = __fmaf_rn(sum, of.decay[tile / TILES_OF_BLOCK][head_of_sum], w[0]);
#pragma unroll
                for (i32 token = 8; token < BLOCK; token += 8) sum = __fadd_rn(sum, w[token]);
            }
        }
#pragma unroll
        for (i32 token = 0; token < S::TOKENS; token += 32) {
            u32 b[2][O_TILES][2]; // of 16 tokens each
            if constexpr (O_TILES == 1) {
                u32 r[4];
                load_b_rows_long<D>(r, v, token, warp * S::COLS, lane);
                b[0][0][0] = r[0], b[0][0][1] = r[1], b[1][0][0] = r[2], b[1][0][1] = r[3];
            } else {
#pragma unroll
                for (i32 half = 0; half < 2; half++) {
#pragma unroll
                    for (i32 col = 0; col < O_TILES; col += 2) {
                        u32 r[4];
                        load_b_rows<D>(r, v, token + half * 16, warp * S::COLS + col * 8, lane);
                        b[half][col][0] = r[0], b[half][col][1] = r[1], b[half][col + 1][0] = r[2], b[half][col + 1][1] = r[3];
                    }
                }
            }
#pragma unroll
            for (i32 half = 0; half < 2; half++) {
                u32 w[4]; // operand a: heads lane / 4 and lane / 4 + 8, then both of the 8 tokens behind
#pragma unroll
                for (i32 i = 0; i < 4; i++) {
                    const i32 at = tile * S::TOKENS + token + half * 16 + i / 2 * 8 + lane % 4 * 2;
                    const float2 pair = *reinterpret_cast<const float2 *>(&of.scores[lane / 4 + i % 2 * 8][at]);
                    w[i] = rounded_pair<T>(pair.x, pair.y);
                }
#pragma unroll
                for (i32 col = 0; col < O_TILES; col++) mma<T>(o[col], w, b[half][col][0], b[half][col][1]);
            }
        }
    }

    // 0 + 4, 1 + 5, 2 + 6, 3 + 7; of these 0 + 2, 1 + 3; of these the even and the odd.
#pragma unroll
    for (i32 step = 4; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    if (sums && lane_of_sum == 0) of.sum[head_of_sum] = sum;
    __syncthreads();

    const bool only = first_split == last_split;
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const i32 in_part = lane / 4 + half * 8, head = first_head + in_part;
        if (in_part >= heads) continue;
        u16 *out = p.out + (i64(row) * p.heads + head) * p.head_dim;
        f32 *partial = p.partials + ((i64(row) * p.heads + head) * p.splits + blockIdx.x) * (p.head_dim + 2);
        const f32 r = __fdiv_rn(1.0f, of.sum[in_part]);
        if (!only && warp == 0 && lane % 4 == 0) partial[0] = of.max[in_part], partial[1] = of.sum[in_part];
#pragma unroll
        for (i32 tile = 0; tile < O_TILES; tile++) {
            const i32 col = warp * S::COLS + tile * 8 + lane % 4 * 2;
            if (col >= p.head_dim) continue;
            const f32 left = o[tile][2 * half], right = o[tile][2 * half + 1];
            if (only) {
                *reinterpret_cast<u32 *>(out + col) = rounded_pair<T>(__fmul_rn(left, r), __fmul_rn(right, r));
            } else {
                float2 pair;
                pair.x = left, pair.y = right;
                *reinterpret_cast<float2 *>(partial + 2 + col) = pair;
            }
        }
    }
}

// The splits of a row, in order. One warp has one head of one row; a row with a single split already has its result.
template <class T> __device__ inline void attend_merge(const Attend &p) {
    constexpr i32 OWN = 256 / WARP; // elements of O a thread
    const i32 row = i32(blockIdx.x), slot = p.slots[row], lane = i32(threadIdx.x) % WARP;
    const i32 head = i32(blockIdx.y) * WARPS + i32(threadIdx.x) / WARP;
    if (slot < 0 || head >= p.heads) return;
    const i32 position = p.positions[row];
    const i32 splits = position / SPLIT - first_attended(position, p.window) / SPLIT + 1;
    if (splits == 1) return;
    const f32 *partial = p.partials + (i64(row) * p.heads + head) * p.splits * (p.head_dim + 2);
    f32 max = partial[0], sum = partial[1], o[OWN];
#pragma unroll
    for (i32 i = 0; i < OWN; i++) o[i] = i * WARP + lane < p.head_dim ? partial[2 + i * WARP + lane] : 0.0f;
#pragma unroll 2
    for (i32 split = 1; split < splits; split++) {
        const f32 *later = partial + i64(split) * (p.head_dim + 2);
        const f32 both = max_or_nan(max, later[0]);
        const f32 a = decay(max, both, p.factor), b = decay(later[0], both, p.factor);
        max = both;
        sum = __fmaf_rn(later[1], b, __fmul_rn(sum, a));
#pragma unroll
        for (i32 i = 0; i < OWN; i++) {
            if (i * WARP + lane < p.head_dim) o[i] = __fmaf_rn(later[2 + i * WARP + lane], b, __fmul_rn(o[i], a));
        }
    }
    const f32 r = __fdiv_rn(1.0f, sum);
    u16 *out = p.out + (i64(row) * p.heads + head) * p.head_dim;
#pragma unroll
    for (i32 i = 0; i < OWN; i++) {
        if (i * WARP + lane < p.head_dim) out[i * WARP + lane] = rounded<T>(__fmul_rn(o[i], r));
    }
}

#define KERNEL(name, T, D)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_decode_##name##_d##D(const __grid_constant__ Attend p) {               \
        attend_decode<T, D>(p);                                                                                                            \
    }
KERNEL(bf16, Bf16, 64)
KERNEL(bf16, Bf16, 128)
KERNEL(bf16, Bf16, 256)
KERNEL(f16, F16, 64)
KERNEL(f16, F16, 128)
KERNEL(f16, F16, 256)

extern "C" __global__ void __launch_bounds__(THREADS) attend_merge_bf16(const __grid_constant__ Attend p) { attend_merge<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) attend_merge_f16(const __grid_constant__ Attend p) { attend_merge<F16>(p); }
