//! Quantized weights as the file stores them, in panels of 16 features: `i8x32` multiplies their integers, `bf16x32` expands them to bf16 a
//! panel at a time.

mod expand;
mod formats;
mod known;
mod pack;
#[cfg(test)]
mod tests;

pub(super) use expand::{Order, expand};
pub(super) use formats::{Format, Kind};
pub(super) use known::known_answers;
pub(super) use pack::{Layout, Weights, unpack};

use super::{Shared, SimdLevel, threads::Threads};
use crate::numerics::QUANTIZED_BLOCK as BLOCK;

/// Output features of a panel.
pub(super) const PANEL: usize = 16;
