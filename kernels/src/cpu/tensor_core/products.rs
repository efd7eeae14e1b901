//! Dot products of rows with the lanes of a panel.

use super::Arithmetic;
use super::operand::Operand;
use super::step::{Group, LANES, RowGroup, add_products_exactly};
use crate::cpu::simd::{Pass, Wide};
use crate::numerics::TensorCore;
use std::ops::Range;

/// Adds the products of some rows with a panel to their sums.
pub(super) struct Products<'a> {
    pub(super) arithmetic: Arithmetic,
    pub(super) x: &'a Operand,
    /// The first row.
    pub(super) first: usize,
    /// The operands of each k: whole groups.
    pub(super) panel: &'a [[u16; LANES]],
    /// For each of the rows the `k` whose products exist; `None`: all. It matters only where an operand is not finite: those of all others
    /// have to be zero.
    pub(super) live: Option<&'a [Range<usize>]>,
    /// Of each row.
    pub(super) sums: &'a mut [[f32; LANES]],
}

impl Pass for Products<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, wide: W) {
        match self.arithmetic.cores {
            TensorCore::Tc16F25 => self.add::<W, { TensorCore::Tc16F25.group() }>(wide),
            TensorCore::Tc8F24 => self.add::<W, { TensorCore::Tc8F24.group() }>(wide),
        }
    }
}

impl Products<'_> {
    #[inline(always)]
    fn add<W: Wide, const G: usize>(self, wide: W) {
        let Self { arithmetic: Arithmetic { half, .. }, x, first, panel, live, sums } = self;
        let (groups, values) = (panel.as_chunks::<G>().0, x.values.as_chunks::<G>().0);
        let (bits, exponents) = (x.bits.as_chunks::<G>().0, x.exponents.as_chunks::<G>().0);
        for (index, words) in groups.iter().enumerate() {
            let group = Group::decode(half, words);
            for (row, acc) in sums.iter_mut().enumerate() {
                let at = index * x.rows + first + row;
                let x = RowGroup { values: &values[at], exponents: &exponents[at] };
                if !group.add_products(wide, x, acc) {
                    let of_group = |k: usize| k.saturating_sub(index * G).min(G);
                    let live = live.map_or(0..G, |live| of_group(live[row].start)..of_group(live[row].end));
                    add_products_exactly(half, &bits[at], words, live, acc);
                }
            }
        }
    }
}
