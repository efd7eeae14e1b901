// Kernels of a forward pass. `T` is the class's format of 16 bits.
//
// A row of a step has a slot and a position. A row whose slot is negative is padding: it reads and writes no KV, and its activations
// are never used.
//
// Generated from kernels/src/cuda/arguments: change it there.
#pragma once

#include "../types.cuh"

enum Epilogue {
    STORE_HALF = 0,   // out = T(total + bias)
    ADD_RESIDUAL = 1, // out (f32) += total
    STORE_F32 = 2,    // out (f32) = total
    STORE_GATED = 3,  // of rows of W that lie 8 apart, gate and up: out [m, n / 2] = T(silu(T(gate)) * T(up))
};

// The KV of one layer in a paged pool, and the block tables of its group.
struct KvPlanes {
    u8 *k; // key of head 0 of token 0 of block 0
    u8 *v; // value
    const i32 *table; // [slots, table_stride]: the block at index i of a sequence is at i % table_stride
    i64 block_bytes; // from one block to the next
    i32 token_bytes; // from one token to the next within a block; head h follows at h * head_dim elements
    i32 block_tokens; // 16 to 128, a power of two
    i32 table_stride;
    i32 reserved;
};
static_assert(sizeof(KvPlanes) == 48, "as the host lays it out");

// residual[row] = table[id], widened. An id below zero stands for what the slot sampled last; one outside the vocabulary counts as 0.
struct Embed {
    const u16 *table; // T [vocab, hidden]
    const i32 *ids; // [rows]
    const i32 *slots; // [rows]
    const i32 *sampled; // [slots]
    f32 *residual; // [rows, hidden]
    i32 rows;
    i32 hidden;
    i32 vocab;
    i32 reserved;
};
static_assert(sizeof(Embed) == 56, "as the host lays it out");

// out[row] = T(norm(x[row]) * gain)
struct RmsNorm {
    const f32 *x; // [rows, cols]
    const f32 *gain; // [cols]
    u16 *out; // T [rows, cols]
    i32 rows;
    i32 cols;
    f32 eps;
    i32 reserved;
};
static_assert(sizeof(RmsNorm) == 40, "as the host lays it out");

// total[m][n] = dot(x[m], w[n])
struct Gemm {
    const u16 *x; // T [m, k]
    const u16 *w; // T [n, k]
    const f32 *bias; // [n], or null
    void *out; // [m, n], or half of it
    i32 m;
    i32 n;
    i32 k;
    i32 epilogue; // see enum Epilogue
};
static_assert(sizeof(Gemm) == 48, "as the host lays it out");

// Of each row: norms of heads (where gains are not null), rotation, q in place, k and v to the pool.
struct RopeStore {
    KvPlanes kv;
    u16 *qkv; // T [rows, (heads + 2 * kv_heads) * head_dim]: q, k, v
    const f32 *q_gain; // [head_dim] or null
    const f32 *k_gain; // [head_dim] or null
    const f32 *cos; // [positions, rope_dim / 2]
    const f32 *sin; // likewise
    const i32 *slots; // [rows]
    const i32 *positions; // [rows]
    i32 rows;
    i32 heads;
    i32 kv_heads;
    i32 head_dim;
    i32 rope_dim;
    f32 q_eps;
    f32 k_eps;
    i32 reserved;
};
static_assert(sizeof(RopeStore) == 136, "as the host lays it out");

// Attention of rows over the pool.
struct Attend {
    KvPlanes kv;
    const u16 *q; // T [rows, q_stride], the first heads * head_dim elements of each
    u16 *out; // T [rows, heads * head_dim]
    const i32 *slots; // [rows]
    const i32 *positions; // [rows]
    const i32 *tiles; // prefill: [tiles, 4]: slot, first row, rows, position of the first row
    f32 *partials; // decode: [rows, heads, splits, head_dim + 2]: max, sum, o
    i32 rows;
    i32 heads;
    i32 kv_heads;
    i32 head_dim;
    i32 q_stride;
    i32 window; // 0: none
    i32 splits; // decode: most splits of a row
    f32 factor; // scale * log2(e), rounded
};
static_assert(sizeof(Attend) == 128, "as the host lays it out");

// inner = T(silu(gate) * up)
struct SiluMul {
    const u16 *gate_up; // T [rows, ffn / 8, 2, 8]: 8 of gate, 8 of up
    u16 *inner; // T [rows, ffn]
    i32 rows;
    i32 ffn;
};
static_assert(sizeof(SiluMul) == 24, "as the host lays it out");

// Copies the chosen rows of the residual stream and of the query.
struct Select {
    const i32 *chosen; // [rows], an index below zero chooses zeros
    const f32 *residual; // [.., hidden]
    f32 *residual_out; // [rows, hidden]
    const u16 *q; // T [.., q_stride]
    u16 *q_out; // T [rows, query]
    i32 rows;
    i32 hidden;
    i32 query;
    i32 q_stride;
};
static_assert(sizeof(Select) == 56, "as the host lays it out");
