//! The sums of [`super::amx`] over a scalar TDPBF16PS.

use super::super::PANEL_GROUP;
use super::{PANEL, Products, QUERY_GROUP, Tile};
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
