//! Passes over the logits of a row, in blocks.

use crate::cpu::simd::{Pass, WIDEST, Wide};
use crate::sampling::exp::{COEFFICIENTS, LN2_HIGH, LN2_LOW, ROUND, UNDERFLOW};
use crate::sampling::{AllowedWords, WORD, mask_word};

/// Logits of a block. Each block has its largest logit, so that later passes go over few of them.
pub(super) const BLOCK: usize = 128;
/// Vectors whose shares are computed together: as many as the registers hold.
const TOGETHER: usize = 4;
/// All bits of an f32 but its sign: ordered as integers, they put infinity and NaN last.
const MAGNITUDE: i32 = 0x7fff_ffff;
const INFINITY: i32 = 0x7f80_0000;
/// `e^x` is less than 2^-40 below this, so that the share is 0.
const NO_SHARE: f32 = -28.0;
/// Of the bits of an f32.
const EXPONENT_BIAS: i32 = 127;

/// Chunk `at` of so many values; a shorter one is filled up in `filled`.
#[inline(always)]
fn chunk<'a, const SIZE: usize>(values: &'a [f32], at: usize, filled: &'a mut [f32; SIZE]) -> &'a [f32; SIZE] {
    let rest = &values[at * SIZE..];
    rest.first_chunk().unwrap_or_else(|| {
        filled[..rest.len()].copy_from_slice(rest);
        filled
    })
}

/// Finds the largest logit of each block. Returns the largest of all, and whether all are finite; if not, the first says nothing.
pub(super) struct Maxima<'a> {
    pub(super) logits: &'a [f32],
    pub(super) maxima: &'a mut [f32],
}

impl Pass for Maxima<'_> {
    type Out = (f32, bool);

    #[inline(always)]
    fn call<W: Wide>(self, w: W) -> (f32, bool) {
        let (lowest, magnitude) = (w.splat(f32::NEG_INFINITY), w.splat_int(MAGNITUDE));
        let (mut best, mut magnitudes) = (lowest, w.splat_int(0));
        for (at, maximum) in self.maxima.iter_mut().enumerate() {
            let mut filled = [self.logits[at * BLOCK]; BLOCK];
            let block = chunk(self.logits, at, &mut filled);
            let mut largest = lowest;
            for vector in 0..BLOCK / W::LANES {
                // SAFETY: the vector lies within the block.
                let x = unsafe { w.load(block.as_ptr().add(vector * W::LANES)) };
                largest = w.max(x, largest);
                magnitudes = w.max_int(w.and(w.bits(x), magnitude), magnitudes);
            }
            *maximum = w.max_lane(largest);
            best = w.max(largest, best);
        }
        (w.max_lane(best), w.max_lane_int(magnitudes) < INFINITY)
    }
}

/// Gives the logit `-inf` to tokens whose bits are not set.
pub(super) struct Mask<'a> {
    pub(super) logits: &'a mut [f32],
    pub(super) words: AllowedWords<'a>,
}

impl Pass for Mask<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, w: W) {
        let Self { logits, mut words } = self;
        let barred = w.splat(f32::NEG_INFINITY);
        let (blocks, rest) = logits.as_chunks_mut::<WORD>();
        for (block, word) in blocks.iter_mut().zip(&mut words) {
            for first in (0..WORD).step_by(W::LANES) {
                // SAFETY: the vector lies within the block.
                unsafe {
                    let at = block.as_mut_ptr().add(first);
                    w.store(at, w.choose((word >> first) as u32, w.load(at), barred));
                }
            }
        }
        if let Some(word) = words.next() {
            mask_word(rest, word);
        }
    }
}

/// What logits are made into shares with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The largest logit.
    pub(super) best: f32,
    pub(super) temperature: f32,
}

impl Scale {
    /// Whether differences are divided: a quotient by 1 is the dividend.
    #[inline(always)]
    fn divides(self) -> bool {
        self.temperature != 1.0
    }

    /// Both parts of the shares of logits, see [`crate::sampling::shares`]: the upper bits, and 24 lower ones. The same operations as there,
    /// but that weights below `e^-87` are that: their shares are 0. Several vectors at a time, since each operation waits for the one before.
    #[inline(always)]
    #[allow(
        clippy::needless_range_loop,
        reason = "iterators take closures, which would not inherit the target features"
    )]
    fn shares<W: Wide, const DIVIDES: bool, const N: usize>(self, w: W, mut x: [W::F; N]) -> [[W::I; N]; 2] {
        let (best, temperature, underflow) = (w.splat(self.best), w.splat(self.temperature), w.splat(UNDERFLOW));
        for i in 0..N {
            x[i] = w.sub(x[i], best);
        }
        if DIVIDES {
            for i in 0..N {
                x[i] = w.div(x[i], temperature);
            }
        }
        let (log2_e, round) = (w.splat(std::f32::consts::LOG2_E), w.splat(ROUND));
        let mut shifted = x;
        for i in 0..N {
            x[i] = w.max(x[i], underflow);
            shifted[i] = w.add(w.mul(x[i], log2_e), round);
        }
        let (high, low) = (w.splat(LN2_HIGH), w.splat(LN2_LOW));
        for i in 0..N {
            let k = w.sub(shifted[i], round);
            x[i] = w.sub(w.sub(x[i], w.mul(k, high)), w.mul(k, low));
        }
        let mut series = [w.splat(COEFFICIENTS[0]); N];
        for c in &COEFFICIENTS[1..] {
            let c = w.splat(*c);
            for i in 0..N {
                series[i] = w.add(w.mul(series[i], x[i]), c);
            }
        }
        let (one, bias) = (w.splat(1.0), w.splat_int(EXPONENT_BIAS));
        for i in 0..N {
            let mantissa = w.add(one, w.add(x[i], w.mul(w.mul(x[i], x[i]), series[i])));
            let power = w.shift_left::<23>(w.add_int(w.bits(shifted[i]), bias));
            x[i] = w.mul(mantissa, w.float_of_bits(power));
        }
        let (upper_bits, lower_bits) = (w.splat(65_536.0), w.splat(16_777_216.0));
        let (mut upper, mut lower) = ([w.splat_int(0); N], [w.splat_int(0); N]);
        for i in 0..N {
            x[i] = w.mul(x[i], upper_bits);
            upper[i] = w.truncate(x[i]);
        }
        for i in 0..N {
            lower[i] = w.truncate(w.mul(w.sub(x[i], w.float(upper[i])), lower_bits));
        }
        [upper, lower]
    }

    /// The sum of a block's shares.
    #[inline(always)]
    fn sum<W: Wide, const DIVIDES: bool>(self, w: W, block: &[f32; BLOCK]) -> u64 {
        // The lower parts of 128 shares sum up to less than 2^31.
        let (mut high, mut low) = (w.splat_int(0), w.splat_int(0));
        for group in 0..BLOCK / W::LANES / TOGETHER {
            // SAFETY: the vectors lie within the block.
            let logits = unsafe { load(w, block.as_ptr().add(group * TOGETHER * W::LANES)) };
            let [upper, lower] = self.shares::<W, DIVIDES, TOGETHER>(w, logits);
            for i in 0..TOGETHER {
                (high, low) = (w.add_int(high, upper[i]), w.add_int(low, lower[i]));
            }
        }
        (u64::from(w.sum(high)) << 24) + u64::from(w.sum(low))
    }
}

impl Scale {
    /// Stores the shares of so many vectors. Returns how many shares these are.
    ///
    /// # Safety
    /// The vectors are readable, and `to` is writable for as many shares.
    #[inline(always)]
    unsafe fn store<W: Wide, const DIVIDES: bool, const N: usize>(self, w: W, from: *const f32, to: *mut u64) -> usize {
        // SAFETY: the caller's promise.
        let logits = unsafe { load::<W, N>(w, from) };
        let [high, low] = self.shares::<W, DIVIDES, N>(w, logits);
        for i in 0..N {
            // SAFETY: the caller's promise.
            unsafe { w.store_sums(to.add(i * W::LANES), high[i], low[i]) };
        }
        N * W::LANES
    }
}

/// Vectors one behind another.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn load<W: Wide, const N: usize>(w: W, from: *const f32) -> [W::F; N] {
    let mut vectors = [w.splat(0.0); N];
    for (i, vector) in vectors.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *vector = unsafe { w.load(from.add(i * W::LANES)) };
    }
    vectors
}

/// Sums the shares of each block. Returns the sum of all.
pub(super) struct Sums<'a> {
    pub(super) scale: Scale,
    pub(super) logits: &'a [f32],
    pub(super) maxima: &'a [f32],
    pub(super) sums: &'a mut [u64],
}

impl Sums<'_> {
    #[inline(always)]
    fn fill<W: Wide, const DIVIDES: bool>(self, w: W) -> u64 {
        let mut total = 0;
        for (at, (maximum, sum)) in self.maxima.iter().zip(self.sums).enumerate() {
            *sum = 0;
            if (*maximum - self.scale.best) / self.scale.temperature >= NO_SHARE {
                let mut filled = [f32::NEG_INFINITY; BLOCK];
                *sum = self.scale.sum::<W, DIVIDES>(w, chunk(self.logits, at, &mut filled));
            }
            total += *sum;
        }
        total
    }
}

impl Pass for Sums<'_> {
    type Out = u64;

    #[inline(always)]
    fn call<W: Wide>(self, w: W) -> u64 {
        if self.scale.divides() { self.fill::<W, true>(w) } else { self.fill::<W, false>(w) }
    }
}

/// The share of each logit, of which there are whole vectors of the widest kind.
pub(super) struct Shares<'a> {
    pub(super) scale: Scale,
    pub(super) logits: &'a [f32],
    pub(super) shares: &'a mut [u64],
}

impl Shares<'_> {
    #[inline(always)]
    fn fill<W: Wide, const DIVIDES: bool>(self, w: W) {
        let (len, mut at) = (self.logits.len(), 0);
        while at < len {
            // SAFETY: both are as long, and whole vectors.
            let (from, to) = unsafe { (self.logits.as_ptr().add(at), self.shares.as_mut_ptr().add(at)) };
            // SAFETY: as above; so many more are there.
            at += unsafe {
                if at + TOGETHER * W::LANES <= len {
                    self.scale.store::<W, DIVIDES, TOGETHER>(w, from, to)
                } else {
                    self.scale.store::<W, DIVIDES, 1>(w, from, to)
                }
            };
        }
    }
}

impl Pass for Shares<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, w: W) {
        assert!(self.logits.len() == self.shares.len() && self.logits.len().is_multiple_of(WIDEST));
        if self.scale.divides() { self.fill::<W, true>(w) } else { self.fill::<W, false>(w) }
    }
}

/// Writes the tokens, by ascending id, whose logits are at least `from` and less than `below`, and these logits. Returns how many. Both
/// lists have room for them, and for a vector of the widest kind more.
pub(super) struct Gather<'a> {
    pub(super) logits: &'a [f32],
    pub(super) maxima: &'a [f32],
    pub(super) from: f32,
    pub(super) below: f32,
    pub(super) tokens: &'a mut [u32],
    pub(super) values: &'a mut [f32],
}

impl Pass for Gather<'_> {
    type Out = usize;

    #[inline(always)]
    fn call<W: Wide>(self, w: W) -> usize {
        let room = self.tokens.len().min(self.values.len());
        let (from, below) = (w.splat(self.from), w.splat(self.below));
        let mut count = 0;
        for (at, maximum) in self.maxima.iter().enumerate() {
            if *maximum < self.from {
                continue;
            }
            let mut filled = [f32::NAN; BLOCK];
            let block = chunk(self.logits, at, &mut filled);
            for vector in 0..BLOCK / W::LANES {
                let first = vector * W::LANES;
                // SAFETY: the vector lies within the block.
                let logits = unsafe { w.load(block.as_ptr().add(first)) };
                let chosen = w.within(logits, from, below);
                if chosen != 0 {
                    let tokens = w.count_from((at * BLOCK + first) as i32);
                    assert!(count + W::LANES <= room, "{room} is too little room");
                    // SAFETY: both lists have room for a vector more.
                    unsafe {
                        let (values_to, to) =
                            (self.values.as_mut_ptr().add(count), self.tokens.as_mut_ptr().add(count));
                        w.store_chosen(chosen, logits, values_to, tokens, to);
                    }
                    count += chosen.count_ones() as usize;
                }
            }
        }
        count
    }
}

/// Cuts a range of logits into equal parts, the first from the upper end: the part of each logit, of which there are whole vectors of the
/// widest kind. Greater logits are never in later parts.
pub(super) struct Parts<'a> {
    pub(super) logits: &'a [f32],
    /// The upper end.
    pub(super) upper: f32,
    /// Parts per unit.
    pub(super) scale: f32,
    pub(super) parts: &'a mut [u32],
}

impl Pass for Parts<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, w: W) {
        assert!(self.logits.len() == self.parts.len() && self.logits.len().is_multiple_of(WIDEST));
        let (upper, scale) = (w.splat(self.upper), w.splat(self.scale));
        for at in (0..self.logits.len()).step_by(W::LANES) {
            // SAFETY: both are as long, and whole vectors.
            unsafe {
                let logits = w.load(self.logits.as_ptr().add(at));
                w.store_int(self.parts.as_mut_ptr().add(at), w.truncate(w.mul(w.sub(upper, logits), scale)));
            }
        }
    }
}
