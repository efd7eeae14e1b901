//! The control word of flushed arithmetic.

/// MXCSR with all exceptions masked, rounding to nearest even, subnormal inputs (DAZ) and results (FTZ) zero. It holds only inside an `asm!`
/// block that restores the old value, as Rust demands.
pub(super) const MXCSR_FLUSHED: u32 = 0x1f80 | 1 << 15 | 1 << 6;
