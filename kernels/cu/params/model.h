// Arguments of the kernels of a forward pass. `T` is the class's format of 16 bits, passed as its bits.
//
// A row of a step has a slot and a position. A row whose slot is negative is padding: it reads and writes no KV, and its activations are
// never used.
#pragma once

#include "../types.cuh"

// The KV of one layer in a paged pool, and the block tables of its group.
struct KvPlanes {
    u8 *k, *v;            // key, value of head 0 of token 0 of block 0
    const i32 *table;     // [slots, table_stride]: the block at index i of a sequence is at i % table_stride
    i64 block_bytes;      // from one block to the next
    i32 token_bytes;      // from one token to the next within a block; head h follows at h * head_dim elements
    i32 block_tokens;     // 16 to 128, a power of two
    i32 table_stride;
    i32 reserved;
};

// residual[row] = table[id], widened. An id below zero stands for what the slot sampled last; one outside the vocabulary counts as 0.
struct Embed {
    const u16 *table;     // T [vocab, hidden]
    const i32 *ids, *slots; // [rows]
    const i32 *sampled;   // [slots]
    f32 *residual;        // [rows, hidden]
    i32 rows, hidden, vocab, reserved;
};

// out[row] = T(norm(x[row]) * gain)
struct RmsNorm {
    const f32 *x;         // [rows, cols]
    const f32 *gain;      // [cols]
    u16 *out;             // T [rows, cols]
    i32 rows, cols;
    f32 eps;
    i32 reserved;
};

enum Epilogue {
    STORE_HALF = 0,       // out = T(total + bias)
    ADD_RESIDUAL = 1,     // out (f32) += total
    STORE_F32 = 2,        // out (f32) = total
};

// total[m][n] = dot(x[m], w[n])
struct Gemm {
    const u16 *x;         // T [m, k]
    const u16 *w;         // T [n, k]
    const f32 *bias;      // [n], or null
    void *out;            // [m, n]
    i32 m, n, k;
    i32 epilogue;
};

// Of each row: norms of heads (where gains are not null), rotation, q in place, k and v to the pool.
struct RopeStore {
    KvPlanes kv;
    u16 *qkv;             // T [rows, (heads + 2 * kv_heads) * head_dim]: q, k, v
    const f32 *q_gain, *k_gain; // [head_dim] or null
    const f32 *cos, *sin; // [positions, rope_dim / 2]
    const i32 *slots, *positions; // [rows]
    i32 rows, heads, kv_heads, head_dim, rope_dim;
    f32 q_eps, k_eps;
    i32 reserved;
};

// Attention of rows over the pool.
struct Attend {
    KvPlanes kv;
    const u16 *q;         // T [rows, q_stride], the first heads * head_dim elements of each
    u16 *out;             // T [rows, heads * head_dim]
    const i32 *slots, *positions; // [rows]
    const i32 *tiles;     // prefill: [tiles, 4]: slot, first row, rows, position of the first row
    f32 *partials;        // decode: [rows, heads, splits, head_dim + 2]: max, sum, o
    i32 rows, heads, kv_heads, head_dim, q_stride;
    i32 window;           // 0: none
    i32 splits;           // decode: most splits of a row
    f32 factor;           // scale * log2(e), rounded
};

// inner = T(silu(gate) * up)
struct SiluMul {
    const u16 *gate_up;   // T [rows, 2 * ffn]
    u16 *inner;           // T [rows, ffn]
    i32 rows, ffn;
};

// Copies the chosen rows of the residual stream and of the query.
struct Select {
    const i32 *chosen;    // [rows], an index below zero chooses zeros
    const f32 *residual;  // [.., hidden]
    f32 *residual_out;    // [rows, hidden]
    const u16 *q;         // T [.., q_stride]
    u16 *q_out;           // T [rows, query]
    i32 rows, hidden, query, q_stride;
};
