//! Class `f32fma`: f32 activations, products summed by FMA with k ascending.

mod attention;
mod linear;
mod pack;

pub(super) use attention::attend;
pub(super) use linear::{TILE_ROWS, product};
pub(super) use pack::Panels;
