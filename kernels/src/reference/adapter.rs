//! Low-rank changes of linears, as `docs/numerics.md` writes them.

use crate::adapter::LowRank;
use crate::numerics::lanes;

/// Adds the change to each row of `y`.
pub(crate) fn adapt(x: &[f32], change: &LowRank, y: &mut [f32]) {
    let LowRank { rank, k, n, a, b, scale } = change;
    for (x, y) in x.chunks_exact(*k).zip(y.chunks_exact_mut(*n)) {
        let down: Vec<f32> = (0..*rank).map(|j| lanes::dot(x, &a[j * k..(j + 1) * k])).collect();
        for (i, y) in y.iter_mut().enumerate() {
            let up = down.iter().enumerate().fold(0.0f32, |up, (j, down)| b[j * n + i].mul_add(*down, up));
            *y += scale * up;
        }
    }
}
