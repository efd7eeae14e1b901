//! Blocks of a panel as pairs of bf16, in the order of `bf16x32`.
//!
//! Each value is the format's product and sum, then rounded to bf16. Products are exact, so a fused multiply-add gives the same bits: d has 11
//! significant bits, sc times q at most 13. None is subnormal: all are multiples of 2^-24.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::formats::{Format, Kind};
use super::pack::Layout;
use super::{BLOCK, PANEL, SimdLevel};
use std::ops::Range;

/// Pair words of a block.
const PAIRS: usize = BLOCK / 2;

/// Where pair words go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    /// Pairs of neighbours, as TDPBF16PS takes them; else k in the high half and k + 2 in the low one, as VDPBF16PS does.
    pub(crate) tiles: bool,
    /// Words from one pair to the next.
    pub(crate) stride: usize,
    /// Words before the first of each pair.
    pub(crate) first: usize,
}

/// Writes the weights of some blocks of a panel of `format`, rounded to bf16, as pair words `[blocks, 16 pairs, stride]`, 16 of each stride.
///
/// # Panics
/// If a block does not exist, `to` does not have the words of all blocks, or the processor lacks the level.
pub(crate) fn expand(
    level: SimdLevel,
    format: Format,
    panel: &[u8],
    blocks: Range<usize>,
    order: Order,
    to: &mut [u32],
) {
    let layout = Layout::of(format);
    assert!(level.available() && order.first + PANEL <= order.stride);
    assert!(blocks.end <= panel.len() / layout.group() * layout.blocks);
    assert!(to.len() >= blocks.len() * PAIRS * order.stride);
    let to = to.as_mut_ptr().wrapping_add(order.first);
    // SAFETY: the level is available, the panel has the blocks, and `to` has the words of all pairs.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if level >= SimdLevel::Avx512Bf16 {
            return avx512::expand_bf16(format, panel, blocks, order, to);
        } else if level >= SimdLevel::Avx512 {
            return avx512::expand(format, panel, blocks, order, to);
        } else if level == SimdLevel::Avx2Fma {
            return avx2::expand(format, panel, blocks, order, to);
        }
        all::<portable::Portable>(format, panel, blocks, order, to);
    }
}

/// Vectors of some features. Operations are on each feature's word, or where they say so on each of its four bytes.
///
/// A function of an implementation may be called only where the processor has its instructions.
trait Lanes {
    /// Features of a vector.
    const WIDTH: usize;
    type Int: Copy;
    type Float: Copy;

    /// # Safety
    /// As for all of them; `from` is readable for a word of each feature.
    unsafe fn words(from: *const u8) -> Self::Int;
    /// A byte of each feature, widened.
    /// # Safety
    /// `from` is readable for them.
    unsafe fn bytes(from: *const u8) -> Self::Int;
    /// An f16 of each feature, widened.
    /// # Safety
    /// `from` is readable for them.
    unsafe fn halves(from: *const u8) -> Self::Float;
    /// # Safety
    /// `to` is writable for a word of each feature.
    unsafe fn store(x: Self::Int, to: *mut u32);

    fn splat(x: u32) -> Self::Int;
    fn and(a: Self::Int, b: Self::Int) -> Self::Int;
    fn or(a: Self::Int, b: Self::Int) -> Self::Int;
    fn add(a: Self::Int, b: Self::Int) -> Self::Int;
    fn shift_left(x: Self::Int, by: u32) -> Self::Int;
    fn shift_right(x: Self::Int, by: u32) -> Self::Int;
    /// Of signed integers.
    fn float(x: Self::Int) -> Self::Float;
    /// Nibble `at` of each word, the lowest first, less `offset`.
    fn nibble(x: Self::Int, at: u32, offset: u32) -> Self::Float {
        let q = Self::and(Self::shift_right(x, 4 * at), Self::splat(0xf));
        Self::float(Self::add(q, Self::splat(offset.wrapping_neg())))
    }
    fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b + c` for an exact product: with one rounding or two.
    fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// Rounds both to bf16, to nearest even: `high` in the upper half of each word, `low` in the lower one. No value is NaN or subnormal.
    fn pair(high: Self::Float, low: Self::Float) -> Self::Int;
}

/// One copy of the loops for each format, so that their branches on it are gone.
///
/// # Safety
/// The processor has the instructions of `L`; the panel has the blocks; `to` is writable for 16 words at each stride of all pairs.
#[inline(always)]
unsafe fn all<L: Lanes>(format: Format, panel: &[u8], blocks: Range<usize>, order: Order, to: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe {
        match format {
            Format::Q4_0 => each::<L>(Format::Q4_0, panel, blocks, order, to),
            Format::Q4_1 => each::<L>(Format::Q4_1, panel, blocks, order, to),
            Format::Q8_0 => each::<L>(Format::Q8_0, panel, blocks, order, to),
            Format::Q4K => each::<L>(Format::Q4K, panel, blocks, order, to),
            Format::Q5K => each::<L>(Format::Q5K, panel, blocks, order, to),
            Format::Q6K => each::<L>(Format::Q6K, panel, blocks, order, to),
        }
    }
}

/// # Safety
/// As [`all`].
#[inline(always)]
unsafe fn each<L: Lanes>(format: Format, panel: &[u8], blocks: Range<usize>, order: Order, to: *mut u32) {
    let layout = Layout::of(format);
    for (at, block) in blocks.enumerate() {
        let (group, sub) = (block / layout.blocks, block % layout.blocks);
        let header = panel.as_ptr().wrapping_add(group * layout.group());
        let stored = header.wrapping_add(layout.header + sub * layout.block);
        fetch(stored, layout.lines());
        for first in (0..PANEL).step_by(L::WIDTH) {
            let to = to.wrapping_add(at * PAIRS * order.stride + first);
            // SAFETY: the group's bytes and the block's words, of these features.
            unsafe {
                let scales = Scales::<L>::read(format, header, sub, first);
                let stored = stored.wrapping_add(first * 4);
                half::<L>(format, stored, 0, &scales, order, to);
                half::<L>(format, stored, 1, &scales, order, to.wrapping_add(PAIRS / 2 * order.stride));
            }
        }
    }
}

/// Bytes ahead of those being expanded that are fetched into the first-level cache.
const AHEAD: usize = 4 << 10;

/// Fetches what follows, which would otherwise be waited for.
#[inline(always)]
fn fetch(_stored: *const u8, _lines: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0.._lines {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(_stored.wrapping_add(AHEAD + line * 64).cast()) };
    }
}

/// The pairs of the first or second 16 values.
///
/// # Safety
/// As [`each`], for the features of one vector.
#[inline(always)]
unsafe fn half<L: Lanes>(
    format: Format,
    stored: *const u8,
    half: usize,
    scales: &Scales<L>,
    order: Order,
    to: *mut u32,
) {
    for word in 0..4 {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { integers::<L>(format, stored, half, word) };
        let [a, b] = [scales.value(format, half, a), scales.value(format, half, b)];
        let [c, d] = [scales.value(format, half, c), scales.value(format, half, d)];
        let pairs = if order.tiles { [L::pair(b, a), L::pair(d, c)] } else { [L::pair(a, c), L::pair(b, d)] };
        for (pair, words) in pairs.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { L::store(words, to.wrapping_add((word * 2 + pair) * order.stride)) };
        }
    }
}

/// Four of the first or second 16 integers from `4 * word` on, less the format's offset. No closures: the compiler would not inline them.
///
/// # Safety
/// As [`each`], for the features of one vector.
#[inline(always)]
unsafe fn integers<L: Lanes>(format: Format, stored: *const u8, half: usize, word: usize) -> [L::Float; 4] {
    let offset = format.offset() as u32;
    // SAFETY: the caller's promise.
    let bytes = unsafe {
        match format {
            Format::Q4_0 | Format::Q4_1 | Format::Q4K => {
                let (x, first) = (vector::<L>(stored, word), half as u32);
                let [a, b] = [L::nibble(x, first, offset), L::nibble(x, first + 2, offset)];
                return [a, b, L::nibble(x, first + 4, offset), L::nibble(x, first + 6, offset)];
            }
            Format::Q8_0 => vector::<L>(stored, half * 4 + word),
            Format::Q5K => high_and_nibbles::<L>(stored, half, word, (vector::<L>(stored, 4), half * 4 + word), 0x01),
            Format::Q6K => high_and_nibbles::<L>(stored, half, word, (vector::<L>(stored, 4 + half), word * 2), 0x03),
        }
    };
    let less = L::splat(offset.wrapping_neg());
    [
        L::float(L::add(L::and(bytes, L::splat(0xff)), less)),
        L::float(L::add(L::and(L::shift_right(bytes, 8), L::splat(0xff)), less)),
        L::float(L::add(L::and(L::shift_right(bytes, 16), L::splat(0xff)), less)),
        L::float(L::add(L::shift_right(bytes, 24), less)),
    ]
}

/// # Safety
/// As [`each`], for the features of one vector.
#[inline(always)]
unsafe fn vector<L: Lanes>(stored: *const u8, index: usize) -> L::Int {
    // SAFETY: the caller's promise.
    unsafe { L::words(stored.wrapping_add(index * PANEL * 4)) }
}

/// Bytes of a nibble each, below bits that `mask` takes of other bytes, shifted.
///
/// # Safety
/// As [`each`], for the features of one vector.
#[inline(always)]
unsafe fn high_and_nibbles<L: Lanes>(
    stored: *const u8,
    half: usize,
    word: usize,
    (high, shift): (L::Int, usize),
    mask: u32,
) -> L::Int {
    // SAFETY: the caller's promise.
    let low = L::shift_right(unsafe { vector::<L>(stored, word) }, (half * 4) as u32);
    let high = L::and(L::shift_right(high, shift as u32), L::splat(mask * 0x0101_0101));
    L::or(L::and(low, L::splat(0x0f0f_0f0f)), L::shift_left(high, 4))
}

/// Scales and minima of a block.
struct Scales<L: Lanes> {
    /// Of the first and of the second 16 integers.
    scale: [L::Float; 2],
    min: L::Float,
}

impl<L: Lanes> Scales<L> {
    /// Those of block `sub` of a group, of the features from `first` on.
    ///
    /// # Safety
    /// `header` is readable for a header of the format; the processor has the instructions.
    #[inline(always)]
    unsafe fn read(format: Format, header: *const u8, sub: usize, first: usize) -> Self {
        // SAFETY: the caller's promise.
        let (halves, bytes) = unsafe {
            let halves = |at: usize| L::halves(header.wrapping_add(at + 2 * first));
            let bytes = |part: usize| L::bytes(header.wrapping_add(64 + sub * 32 + part * PANEL + first));
            match format {
                Format::Q4_0 | Format::Q8_0 => ([halves(0); 2], [L::splat(0); 2]),
                Format::Q4_1 => ([halves(0), halves(32)], [L::splat(0); 2]),
                Format::Q4K | Format::Q5K => ([halves(0), halves(32)], [bytes(0), bytes(1)]),
                Format::Q6K => ([halves(0); 2], [bytes(0), bytes(1)]),
            }
        };
        let ([d, m], [a, b]) = (halves, bytes);
        match format {
            Format::Q4_0 | Format::Q8_0 | Format::Q4_1 => Self { scale: [d; 2], min: m },
            Format::Q4K | Format::Q5K => Self { scale: [L::mul(d, L::float(a)); 2], min: L::mul(m, L::float(b)) },
            Format::Q6K => Self { scale: [a, b].map(|sc| L::mul(d, L::float(signed::<L>(sc)))), min: d },
        }
    }

    /// The values of integers.
    #[inline(always)]
    fn value(&self, format: Format, half: usize, q: L::Float) -> L::Float {
        match format.kind() {
            Kind::Min => L::mul_add(q, self.scale[half], self.min),
            Kind::One | Kind::Two => L::mul(q, self.scale[half]),
        }
    }
}

/// Bytes as signed integers: `(x ^ 0x80) - 0x80`, the first as a sum without its carry.
#[inline(always)]
fn signed<L: Lanes>(bytes: L::Int) -> L::Int {
    let flipped = L::and(L::add(bytes, L::splat(0x80)), L::splat(0xff));
    L::add(flipped, L::splat(0x80u32.wrapping_neg()))
}
