//! The sums of [`super::amx`] over a scalar TDPBF16PS.

use super::super::PANEL_GROUP;
use super::{PANEL, Place, Products, QUERY_GROUP, Tile};
use crate::cpu::amx_scalar::tdpbf16ps;

#[derive(Default)]
pub(in super::super) struct Scalar;

impl Products for Scalar {
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        for query in 0..queries {
            // SAFETY: the caller's promise.
            unsafe { tile.out.byte_add(query * tile.out_stride).write_bytes(0, tile.count * PANEL) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.add_sums(queries, tile) }
    }

    unsafe fn few_sums(&mut self, queries: usize, tile: Tile) {
        let groups = tile.groups;
        for query in 0..queries {
            for token in 0..tile.count * PANEL {
                // SAFETY: the caller's promise.
                unsafe {
                    let x = tile.queries.byte_add(query * tile.query_stride);
                    let Place { first, stride } = *tile.panels.cast::<Place>().add(token / 16);
                    let key = first.wrapping_add((token % 16).wrapping_mul(stride)).cast::<[u8; 4]>();
                    let sum = (0..groups).fold(0.0, |sum, group| {
                        let pairs = group * QUERY_GROUP..(group + 1) * QUERY_GROUP;
                        let words: [u32; QUERY_GROUP] =
                            std::array::from_fn(|i| u32::from_le_bytes(*key.add(pairs.start + i)));
                        tdpbf16ps(sum, &words, pairs.map(|pair| *x.add(pair)))
                    });
                    *tile.out.byte_add(query * tile.out_stride).add(token) = sum;
                }
            }
        }
    }

    unsafe fn add_sums(&mut self, queries: usize, tile: Tile) {
        let (groups, lanes) = (tile.groups, tile.count * PANEL);
        for query in 0..queries {
            // SAFETY: the caller's promise.
            let (x, panels, out) = unsafe {
                (
                    std::slice::from_raw_parts(tile.queries.byte_add(query * tile.query_stride), groups * QUERY_GROUP),
                    std::slice::from_raw_parts(tile.panels, tile.count * groups * PANEL_GROUP),
                    std::slice::from_raw_parts_mut(tile.out.byte_add(query * tile.out_stride), lanes),
                )
            };
            for (panel, out) in panels.chunks_exact(groups * PANEL_GROUP).zip(out.chunks_exact_mut(PANEL)) {
                for (x, w) in x.chunks_exact(QUERY_GROUP).zip(panel.chunks_exact(PANEL_GROUP)) {
                    for (lane, out) in out.iter_mut().enumerate() {
                        *out = tdpbf16ps(*out, x, w[lane..].iter().step_by(PANEL).copied());
                    }
                }
            }
        }
    }
}
