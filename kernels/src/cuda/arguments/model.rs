//! Arguments of the kernels of a forward pass.

use super::{Any, In, Out, arguments};

/// What the header says first.
#[cfg(any(test, feature = "testing"))]
pub(crate) const INTRO: &str = "Kernels of a forward pass. `T` is the class's format of 16 bits.\n\
    //\n\
    // A row of a step has a slot and a position. A row whose slot is negative is padding: it reads and writes no KV, and its activations\n\
    // are never used.";

/// What a product does with its total.
pub(crate) mod epilogue {
    /// `out = T(total + bias)`
    pub(crate) const STORE_HALF: i32 = 0;
    /// `out (f32) += total`
    pub(crate) const ADD_RESIDUAL: i32 = 1;
    /// `out (f32) = total`
    pub(crate) const STORE_F32: i32 = 2;
    /// Of rows of W that lie 8 apart, gate and up: `out [m, n / 2] = T(silu(T(gate)) * T(up))`
    pub(crate) const STORE_GATED: i32 = 3;
}

/// The same for kernels.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn constants() -> String {
    use epilogue::{ADD_RESIDUAL, STORE_F32, STORE_GATED, STORE_HALF};
    format!(
        "enum Epilogue {{\n    STORE_HALF = {STORE_HALF},   // out = T(total + bias)\n    ADD_RESIDUAL = {ADD_RESIDUAL}, \
         // out (f32) += total\n    STORE_F32 = {STORE_F32},    // out (f32) = total\n    STORE_GATED = {STORE_GATED},  // of rows of W that lie 8 apart, gate and up: out [m, n / 2] = \
         T(silu(T(gate)) * T(up))\n}};\n"
    )
}

arguments! {
    /// The KV of one layer in a paged pool, and the block tables of its group.
    struct KvPlanes {
        /// key of head 0 of token 0 of block 0
        k: Out<u8>,
        /// value
        v: Out<u8>,
        /// [slots, table_stride]: the block at index i of a sequence is at i % table_stride
        table: In<i32>,
        /// from one block to the next
        block_bytes: i64,
        /// from one token to the next within a block; head h follows at h * head_dim elements
        token_bytes: i32,
        /// 16 to 128, a power of two
        block_tokens: i32,
        table_stride: i32,
        reserved: i32,
    }

    /// residual[row] = table[id], widened. An id below zero stands for what the slot sampled last; one outside the vocabulary counts as 0.
    struct Embed {
        /// T [vocab, hidden]
        table: In<u16>,
        /// [rows]
        ids: In<i32>,
        /// [rows]
        slots: In<i32>,
        /// [slots]
        sampled: In<i32>,
        /// [rows, hidden]
        residual: Out<f32>,
        rows: i32,
        hidden: i32,
        vocab: i32,
        reserved: i32,
    }

    /// out[row] = T(norm(x[row]) * gain)
    struct RmsNorm {
        /// [rows, cols]
        x: In<f32>,
        /// [cols]
        gain: In<f32>,
        /// T [rows, cols]
        out: Out<u16>,
        rows: i32,
        cols: i32,
        eps: f32,
        reserved: i32,
    }

    /// total[m][n] = dot(x[m], w[n])
    struct Gemm {
        /// T [m, k]
        x: In<u16>,
        /// T [n, k]
        w: In<u16>,
        /// [n], or null
        bias: In<f32>,
        /// [m, n], or half of it
        out: Out<Any>,
        m: i32,
        n: i32,
        k: i32,
        /// see enum Epilogue
        epilogue: i32,
    }

    /// Of each row: norms of heads (where gains are not null), rotation, q in place, k and v to the pool.
    struct RopeStore {
        kv: KvPlanes,
        /// T [rows, (heads + 2 * kv_heads) * head_dim]: q, k, v
        qkv: Out<u16>,
        /// [head_dim] or null
        q_gain: In<f32>,
        /// [head_dim] or null
        k_gain: In<f32>,
        /// [positions, rope_dim / 2]
        cos: In<f32>,
        /// likewise
        sin: In<f32>,
        /// [rows]
        slots: In<i32>,
        /// [rows]
        positions: In<i32>,
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        rope_dim: i32,
        q_eps: f32,
        k_eps: f32,
        reserved: i32,
    }

    /// Attention of rows over the pool.
    struct Attend {
        kv: KvPlanes,
        /// T [rows, q_stride], the first heads * head_dim elements of each
        q: In<u16>,
        /// T [rows, heads * head_dim]
        out: Out<u16>,
        /// [rows]
        slots: In<i32>,
        /// [rows]
        positions: In<i32>,
        /// prefill: [tiles, 4]: slot, first row, rows, position of the first row
        tiles: In<i32>,
        /// decode: [rows, heads, splits, head_dim + 2]: max, sum, o
        partials: Out<f32>,
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        q_stride: i32,
        /// 0: none
        window: i32,
        /// decode: most splits of a row
        splits: i32,
        /// scale * log2(e), rounded
        factor: f32,
    }

    /// inner = T(silu(gate) * up)
    struct SiluMul {
        /// T [rows, ffn / 8, 2, 8]: 8 of gate, 8 of up
        gate_up: In<u16>,
        /// T [rows, ffn]
        inner: Out<u16>,
        rows: i32,
        ffn: i32,
    }

    /// Copies the chosen rows of the residual stream and of the query.
    struct Select {
        /// [rows], an index below zero chooses zeros
        chosen: In<i32>,
        /// [.., hidden]
        residual: In<f32>,
        /// [rows, hidden]
        residual_out: Out<f32>,
        /// T [.., q_stride]
        q: In<u16>,
        /// T [rows, query]
        q_out: Out<u16>,
        rows: i32,
        hidden: i32,
        query: i32,
        q_stride: i32,
    }
}
