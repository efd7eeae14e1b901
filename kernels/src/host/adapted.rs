//! Which rows of a step use which adapter.

use super::HostKernels;
use crate::adapter::{Linear, LowRank, PackedAdapter};
use std::ops::Range;

/// Rows of one adapter.
type Run<'a> = (Range<usize>, &'a PackedAdapter);

/// The rows of a step that have an adapter.
#[derive(Default)]
pub(crate) struct AdaptedRows<'a> {
    runs: Vec<Run<'a>>,
}

/// The same, in one layer.
#[derive(Clone, Copy)]
pub(crate) struct AdaptedLayer<'a> {
    runs: &'a [Run<'a>],
    layer: u32,
}

/// What the adapters of a step change of one linear.
#[derive(Clone, Copy)]
pub struct Changes<'a> {
    layer: AdaptedLayer<'a>,
    linear: Linear,
}

impl<'a> Changes<'a> {
    /// The rows that have a change, each range with its own; ascending.
    pub(crate) fn iter(self) -> impl Iterator<Item = (Range<usize>, &'a LowRank)> {
        let Self { layer: AdaptedLayer { runs, layer }, linear } = self;
        runs.iter().filter_map(move |(rows, adapter)| Some((rows.clone(), adapter.of(layer, linear)?)))
    }

    /// The same, row by row.
    pub(crate) fn rows(self) -> impl Iterator<Item = (usize, &'a LowRank)> {
        self.iter().flat_map(|(rows, change)| rows.map(move |row| (row, change)))
    }
}

impl<'a> AdaptedRows<'a> {
    /// From the number of rows of each segment, and its adapter.
    pub(crate) fn new(segments: impl Iterator<Item = (usize, Option<&'a PackedAdapter>)>) -> Self {
        let (mut runs, mut end) = (Vec::new(), 0);
        for (rows, adapter) in segments {
            end += rows;
            runs.extend(adapter.map(|adapter| (end - rows..end, adapter)));
        }
        Self { runs }
    }

    /// The same for these rows alone, in their order.
    pub(super) fn select(&self, rows: &[usize]) -> Self {
        if self.runs.is_empty() {
            return Self::default();
        }
        let of = |row: usize| self.runs.iter().find(|(rows, _)| rows.contains(&row)).map(|(_, adapter)| *adapter);
        Self::new(rows.iter().map(|row| (1, of(*row))))
    }

    /// In one layer; `None` if no row has an adapter that changes one of these linears there.
    pub(crate) fn of(&self, layer: u32, linears: &[Linear]) -> Option<AdaptedLayer<'_>> {
        let changes = |(_, adapter): &Run<'_>| linears.iter().any(|linear| adapter.of(layer, *linear).is_some());
        self.runs.iter().any(changes).then_some(AdaptedLayer { runs: &self.runs, layer })
    }
}

impl<'a> AdaptedLayer<'a> {
    /// Of one linear.
    pub(crate) fn changes(self, linear: Linear) -> Changes<'a> {
        Changes { layer: self, linear }
    }

    /// Adds what the adapters change of a linear to its output; `x` and `y` have all rows.
    pub(super) fn add<K: HostKernels>(&self, kernels: &K, linear: Linear, x: &[f32], y: &mut [f32]) {
        kernels.adapt(x, self.changes(linear), y);
    }
}
