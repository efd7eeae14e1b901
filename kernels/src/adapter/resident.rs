//! Adapters as the kernels of a host read them.

use super::{Adapter, Linear};

/// The change of one linear: `y += scale * B (A x)`.
#[derive(Clone, Debug)]
pub(crate) struct LowRank {
    pub(crate) rank: usize,
    /// Elements of `x`.
    pub(crate) k: usize,
    /// Elements of `y`.
    pub(crate) n: usize,
    /// `[rank, k]`
    pub(crate) a: Vec<f32>,
    /// B transposed, `[rank, n]`: the kernels read it along `y`.
    pub(crate) b: Vec<f32>,
    pub(crate) scale: f32,
}

/// A loaded adapter.
#[derive(Debug)]
pub(crate) struct ResidentAdapter {
    /// `[layers, linears]`
    linears: Vec<Option<LowRank>>,
}

impl ResidentAdapter {
    /// An adapter that was checked against a program of `layers` layers.
    pub(crate) fn new(adapter: &Adapter, layers: u32) -> Self {
        let mut linears = vec![None; layers as usize * Linear::ALL.len()];
        for change in &adapter.linears {
            let (rank, n) = (adapter.rank, change.b.len() / adapter.rank);
            let b = (0..rank).flat_map(|j| (0..n).map(move |i| (i, j))).map(|(i, j)| change.b[i * rank + j]).collect();
            let k = change.a.len() / rank;
            let low = LowRank { rank, k, n, a: change.a.clone(), b, scale: change.scale };
            linears[index(change.layer, change.linear)] = Some(low);
        }
        Self { linears }
    }

    pub(crate) fn of(&self, layer: u32, linear: Linear) -> Option<&LowRank> {
        self.linears[index(layer, linear)].as_ref()
    }
}

fn index(layer: u32, linear: Linear) -> usize {
    layer as usize * Linear::ALL.len() + linear as usize
}
