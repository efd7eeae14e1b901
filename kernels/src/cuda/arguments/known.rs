//! Arguments of known answers.

use super::{In, Out, arguments};

/// What the header says first.
#[cfg(any(test, feature = "testing"))]
pub(crate) const INTRO: &str =
    "Known answers: what the instructions under the numerics classes return, for the host to compare.";

/// The arguments of kernels that the host does not launch yet.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn constants() -> String {
    "// out[i] = op(x[i], y[i], z[i]); operands that an operation does not take may be null.\n\
     struct KnownF32 {\n    const f32 *x, *y, *z;\n    u32 *out; // bits\n    i32 count, reserved;\n};\n\n\
     struct KnownF64 {\n    const f64 *x, *y;\n    const u64 *n;\n    u64 *out; // bits\n    i32 count, reserved;\n};\n"
        .into()
}

arguments! {
    /// d[m][n] = c[m][n] + dot(a[m], b[n]) for each tile, k ascending by 16.
    struct KnownTiles {
        /// T [tiles, m, k]; m is 16 for mma.sync, 64 for wgmma
        a: In<u16>,
        /// T [tiles, 8, k]
        b: In<u16>,
        /// [tiles, m, 8]
        c: In<f32>,
        /// [tiles, m, 8]
        d: Out<f32>,
        tiles: i32,
        k: i32,
    }
}
