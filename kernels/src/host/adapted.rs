//! Which rows of a step use which adapter.

use super::HostKernels;
use crate::adapter::{Linear, ResidentAdapter};
use std::ops::Range;

/// Rows of one adapter.
type Run<'a> = (Range<usize>, &'a ResidentAdapter);

/// The rows of a step that have an adapter.
#[derive(Default)]
pub(super) struct AdaptedRows<'a> {
    runs: Vec<Run<'a>>,
}

/// The same, in one layer.
#[derive(Clone, Copy)]
pub(super) struct AdaptedLayer<'a> {
    runs: &'a [Run<'a>],
    layer: u32,
}

impl<'a> AdaptedRows<'a> {
    /// From the number of rows of each segment, and its adapter.
    pub(super) fn new(segments: impl Iterator<Item = (usize, Option<&'a ResidentAdapter>)>) -> Self {
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

    /// In one layer; `None` if no row has an adapter.
    pub(super) fn of(&self, layer: u32) -> Option<AdaptedLayer<'_>> {
        (!self.runs.is_empty()).then_some(AdaptedLayer { runs: &self.runs, layer })
    }

    /// See [`AdaptedLayer::add`].
    pub(super) fn add<K: HostKernels>(&self, kernels: &K, layer: u32, linear: Linear, x: &[f32], y: &mut [f32]) {
        if let Some(adapted) = self.of(layer) {
            adapted.add(kernels, linear, x, y);
        }
    }
}

impl AdaptedLayer<'_> {
    /// Adds what the adapters change of a linear to its output; `x` and `y` have all rows.
    pub(super) fn add<K: HostKernels>(&self, kernels: &K, linear: Linear, x: &[f32], y: &mut [f32]) {
        for (rows, adapter) in self.runs {
            let Some(change) = adapter.of(self.layer, linear) else { continue };
            let (k, n) = (change.k, change.n);
            kernels.adapt(&x[rows.start * k..rows.end * k], change, &mut y[rows.start * n..rows.end * n]);
        }
    }
}
