//! Plain Rust.

use super::Lanes;
use crate::cpu::stored::PANEL;
use half::{bf16, f16};

/// All features of a panel.
pub(super) struct Portable;

fn each<A: Copy, B>(a: [A; PANEL], f: impl Fn(A) -> B) -> [B; PANEL] {
    a.map(f)
}

fn both<A: Copy, B: Copy, C>(a: [A; PANEL], b: [B; PANEL], f: impl Fn(A, B) -> C) -> [C; PANEL] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Portable {
    const WIDTH: usize = PANEL;
    type Int = [u32; PANEL];
    type Float = [f32; PANEL];

    unsafe fn words(from: *const u8) -> Self::Int {
        // SAFETY: the caller's promise; any bytes are words.
        let bytes = unsafe { from.cast::<[[u8; 4]; PANEL]>().read_unaligned() };
        each(bytes, u32::from_le_bytes)
    }
    unsafe fn bytes(from: *const u8) -> Self::Int {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[u8; PANEL]>().read() };
        each(bytes, u32::from)
    }
    unsafe fn halves(from: *const u8) -> Self::Float {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[[u8; 2]; PANEL]>().read_unaligned() };
        each(bytes, |bytes| f16::from_le_bytes(bytes).to_f32())
    }
    unsafe fn store(x: Self::Int, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::Int>().write_unaligned(x) };
    }

    fn splat(x: u32) -> Self::Int {
        [x; PANEL]
    }
    fn and(a: Self::Int, b: Self::Int) -> Self::Int {
        both(a, b, |a, b| a & b)
    }
    fn or(a: Self::Int, b: Self::Int) -> Self::Int {
        both(a, b, |a, b| a | b)
    }
    fn add(a: Self::Int, b: Self::Int) -> Self::Int {
        both(a, b, u32::wrapping_add)
    }
    fn shift_left(x: Self::Int, by: u32) -> Self::Int {
        each(x, |x| x << by)
    }
    fn shift_right(x: Self::Int, by: u32) -> Self::Int {
        each(x, |x| x >> by)
    }
    fn float(x: Self::Int) -> Self::Float {
        each(x, |x| x as i32 as f32)
    }
    fn mul(a: Self::Float, b: Self::Float) -> Self::Float {
        both(a, b, |a, b| a * b)
    }
    fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        both(both(a, b, |a, b| a * b), c, |product, c| product + c)
    }
    fn pair(high: Self::Float, low: Self::Float) -> Self::Int {
        let round = |x| u32::from(bf16::from_f32(x).to_bits());
        both(high, low, |high, low| round(high) << 16 | round(low))
    }
}
