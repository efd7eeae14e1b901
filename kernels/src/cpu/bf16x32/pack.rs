//! Operands repacked for the kernels.
//!
//! A *pair word* holds two bf16 that follow each other in one chain: `k` in the high half, `k + 2` in the low half, because VDPBF16PS adds
//! the product of the high halves first. A group of 32 k has 16 of them, even and odd chain in turn: (0, 2), (1, 3), (4, 6), .. (29, 31).
//!
//! TDPBF16PS takes the even chain from low halves and the odd one from high halves, so for it a pair word holds `k` in the low half and `k + 1`
//! in the high one, k even: the elements in their own order.

use super::level::{has_tiles, pair_words, tile_rows};
use super::{GROUP, SimdLevel};
use crate::cpu::buffer::Buffer;
use crate::cpu::source::Source;
use crate::cpu::stored;
use crate::device::DeviceError;
use half::bf16;
use std::ops::Range;

/// Output features of one panel: two vectors of 16.
pub(crate) const PANEL: usize = 32;

/// Pair words of a group.
pub(crate) const PAIRS: usize = GROUP / 2;

/// Words of one group of a panel.
pub(crate) const GROUP_WORDS: usize = PAIRS * PANEL;

/// First k of pair `pair` of a group; the second is two further.
#[inline(always)]
const fn first_of(pair: usize) -> usize {
    pair / 2 * 4 + pair % 2
}

/// The k of a group whose elements are the low and the high half of pair word `pair`.
#[inline(always)]
const fn halves_of(pair: usize, tiles: bool) -> [usize; 2] {
    if tiles { [pair * 2, pair * 2 + 1] } else { [first_of(pair) + 2, first_of(pair)] }
}

/// One or several stacked weights `[n, k]` in bf16 as panels of [`PANEL`] features, each `[groups, 16 pairs, PANEL]` pair words: one sequential stream,
/// for GEMM and GEMV alike. Features beyond `n` and elements beyond `k` are zero.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Output features of each part.
    parts: Vec<usize>,
    k: usize,
    /// Packed for TDPBF16PS.
    tiles: bool,
    form: Form,
}

/// What memory holds of weights.
#[derive(Debug)]
enum Form {
    /// The words of all panels.
    Words(Buffer),
    /// Each part as the file stores it; a panel's words are made when they are used.
    Stored(Vec<stored::Weights>),
}

/// The words of weights that are all zero.
fn zeros(parts: &[usize], k: usize) -> Result<Buffer, DeviceError> {
    let panels: usize = parts.iter().map(|n| n.div_ceil(PANEL)).sum();
    Buffer::for_weights(panels * k.div_ceil(GROUP) * GROUP_WORDS)
}

impl Weights {
    /// Packs the parts, of so many rows of `k` elements each, for kernels of `level`: `row(part, feature, out)` writes one. Each part begins with
    /// a panel of its own.
    ///
    /// # Errors
    /// If the system gives no memory.
    pub(in crate::cpu) fn pack(
        level: SimdLevel,
        parts: &[usize],
        k: usize,
        mut row: impl FnMut(usize, usize, &mut [bf16]),
    ) -> Result<Self, DeviceError> {
        let (panel_words, tiles) = (k.div_ceil(GROUP) * GROUP_WORDS, has_tiles(level));
        let mut words = zeros(parts, k)?;
        let mut from = vec![bf16::ZERO; k.next_multiple_of(GROUP)];
        let mut first_panel = 0;
        for (part, &n) in parts.iter().enumerate() {
            for feature in 0..n {
                row(part, feature, &mut from[..k]);
                let panel = &mut words[(first_panel + feature / PANEL) * panel_words..][..panel_words];
                for (at, word) in panel[feature % PANEL..].iter_mut().step_by(PANEL).enumerate() {
                    let [low, high] = halves_of(at % PAIRS, tiles).map(|k| from[at / PAIRS * GROUP + k].to_bits());
                    *word = u32::from(high) << 16 | u32::from(low);
                }
            }
            first_panel += n.div_ceil(PANEL);
        }
        Ok(Self { parts: parts.to_vec(), k, tiles, form: Form::Words(words) })
    }

    /// Weights of this shape that are all zero.
    ///
    /// # Errors
    /// If the system gives no memory.
    pub(in crate::cpu) fn zeroed(level: SimdLevel, parts: &[usize], k: usize) -> Result<Self, DeviceError> {
        Ok(Self { parts: parts.to_vec(), k, tiles: has_tiles(level), form: Form::Words(zeros(parts, k)?) })
    }

    /// Weights that stay as the file stores them, for kernels of `level`.
    ///
    /// # Panics
    /// If parts differ in k.
    pub(in crate::cpu) fn stored(level: SimdLevel, parts: Vec<stored::Weights>) -> Self {
        let k = parts.first().map_or(0, stored::Weights::k);
        assert!(parts.iter().all(|part| part.k() == k), "parts of one K");
        let heights = parts.iter().map(stored::Weights::n).collect();
        Self { parts: heights, k, tiles: has_tiles(level), form: Form::Stored(parts) }
    }

    /// What memory holds, in order.
    pub(in crate::cpu) fn bytes(&self) -> Vec<&[u8]> {
        match &self.form {
            Form::Words(words) => vec![words.bytes()],
            Form::Stored(parts) => parts.iter().map(stored::Weights::bytes).collect(),
        }
    }

    /// What memory holds, in order, to be written.
    pub(in crate::cpu) fn bytes_mut(&mut self) -> Vec<&mut [u8]> {
        match &mut self.form {
            Form::Words(words) => vec![words.bytes_mut()],
            Form::Stored(parts) => parts.iter_mut().map(stored::Weights::bytes_mut).collect(),
        }
    }

    /// Output features of each part.
    pub(in crate::cpu) fn parts(&self) -> &[usize] {
        &self.parts
    }

    /// Input features.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// The first panel of a part.
    pub(crate) fn first_panel(&self, part: usize) -> usize {
        self.parts[..part].iter().map(|n| n.div_ceil(PANEL)).sum()
    }

    /// Whether they are packed for kernels of `level`.
    pub(crate) fn suit(&self, level: SimdLevel) -> bool {
        self.tiles == has_tiles(level)
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.parts.iter().map(|n| n.div_ceil(PANEL)).sum()
    }

    /// Groups of K.
    pub(crate) fn groups(&self) -> usize {
        self.k.div_ceil(GROUP)
    }

    /// Whether memory holds the words: where it does not, [`Weights::expand`] makes them.
    pub(crate) fn has_words(&self) -> bool {
        matches!(self.form, Form::Words(_))
    }

    /// The words of some groups of a panel, `[groups, 16, PANEL]`.
    ///
    /// # Panics
    /// If memory does not hold them.
    pub(crate) fn words(&self, panel: usize, groups: Range<usize>) -> &[u32] {
        let Form::Words(words) = &self.form else { unreachable!("words of stored weights") };
        let first = panel * self.groups();
        &words[(first + groups.start) * GROUP_WORDS..(first + groups.end) * GROUP_WORDS]
    }

    /// Makes the words of some groups of a panel in `to`, of [`GROUP_WORDS`] words a group.
    ///
    /// # Panics
    /// If memory holds the words, or there is no such panel or group.
    pub(crate) fn expand(&self, level: SimdLevel, panel: usize, groups: Range<usize>, to: &mut [u32]) {
        const HALVES: usize = PANEL / stored::PANEL;
        let Form::Stored(parts) = &self.form else { unreachable!("weights that are words already") };
        let (part, panel) = self.locate(panel);
        let part = &parts[part];
        for half in 0..HALVES {
            let (from, first) = (panel * HALVES + half, half * stored::PANEL);
            if from < part.panels() {
                let order = stored::Order { tiles: self.tiles, stride: PANEL, first };
                stored::expand(level, part.format(), part.panel(from), groups.clone(), order, to);
            } else {
                to.chunks_exact_mut(PANEL).for_each(|to| to[first..].fill(0));
            }
        }
    }

    /// The part of a panel, and the panel's index in it.
    fn locate(&self, panel: usize) -> (usize, usize) {
        let mut rest = panel;
        for (part, n) in self.parts.iter().enumerate() {
            match rest.checked_sub(n.div_ceil(PANEL)) {
                Some(further) => rest = further,
                None => return (part, rest),
            }
        }
        panic!("panel {panel} of {}", self.panels());
    }

    /// Writes feature `feature` of the first part, widened, to `out`: the embedding of a token.
    ///
    /// # Panics
    /// If there is no such feature or `out` is not of length k.
    pub(crate) fn row(&self, feature: usize, out: &mut [f32]) {
        assert!(feature < self.parts[0] && out.len() == self.k, "feature {feature}, {} of {}", out.len(), self.k);
        if let Form::Stored(parts) = &self.form {
            parts[0].row(feature, out);
            return out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let panel = self.words(feature / PANEL, 0..self.groups());
        for (out, words) in out.chunks_mut(GROUP).zip(panel.chunks_exact(GROUP_WORDS)) {
            for pair in 0..PAIRS {
                let word = words[pair * PANEL + feature % PANEL];
                for (k, bits) in halves_of(pair, self.tiles).into_iter().zip([word << 16, word & 0xffff_0000]) {
                    if let Some(out) = out.get_mut(k) {
                        *out = f32::from_bits(bits);
                    }
                }
            }
        }
    }
}

/// Activations `[m, k]`, rounded to bf16, in blocks of rows that a tile takes at once, each `[groups, 16 pairs, height]` pairs, or for
/// TDPBF16PS `[groups, height, 16 pairs]`.
#[derive(Debug)]
pub(crate) struct Rows {
    level: SimdLevel,
    m: usize,
    k: usize,
    /// Rows of a block; the last may have fewer.
    height: usize,
    words: Buffer,
}

impl Default for Rows {
    fn default() -> Self {
        Self { level: SimdLevel::Portable, m: 0, k: 0, height: 1, words: Buffer::zeroed(0) }
    }
}

impl Rows {
    /// Packs `m` rows of `k` elements for kernels of `level`, into the memory of earlier rows where it suffices.
    pub(in crate::cpu) fn pack(&mut self, level: SimdLevel, m: usize, k: usize, source: &mut Source<'_>) {
        let row_words = k.div_ceil(GROUP) * PAIRS * pair_words(level);
        let height = m.div_ceil(m.div_ceil(tile_rows(level)).max(1)).max(1);
        if self.words.len() < m * row_words {
            self.words = Buffer::zeroed(m * row_words);
        }
        (self.level, self.m, self.k, self.height) = (level, m, k, height);
        for first in (0..m).step_by(height) {
            let rows = first..(first + height).min(m);
            let to = &mut self.words[rows.start * row_words..rows.end * row_words];
            put_rows(level, source.rows(rows), k, to);
        }
    }

    /// Rows.
    pub(crate) fn m(&self) -> usize {
        self.m
    }

    /// Elements of a row.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// The instructions that this packing is for.
    pub(crate) fn level(&self) -> SimdLevel {
        self.level
    }

    pub(crate) fn height(&self) -> usize {
        self.height
    }

    /// The rows of one block.
    pub(crate) fn block_rows(&self, block: usize) -> std::ops::Range<usize> {
        (block * self.height).min(self.m)..((block + 1) * self.height).min(self.m)
    }

    /// The words of one block from group `group` on.
    pub(crate) fn block(&self, block: usize, group: usize) -> &[u32] {
        let rows = self.block_rows(block);
        let group_words = PAIRS * pair_words(self.level);
        let row_words = self.k.div_ceil(GROUP) * group_words;
        &self.words[rows.start * row_words + group * group_words * rows.len()..rows.end * row_words]
    }

    /// Bytes between the end of `groups` groups of a block and the same groups of the next block.
    pub(crate) fn skip(&self, block: usize, groups: usize) -> usize {
        let rows = self.block_rows(block).len();
        (self.k.div_ceil(GROUP) - groups) * PAIRS * pair_words(self.level) * rows * size_of::<u32>()
    }
}

/// Packs the rows of one block.
fn put_rows(level: SimdLevel, x: &[f32], k: usize, to: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if level == SimdLevel::Amx {
        // SAFETY: kernels exist only for levels that the processor has.
        return unsafe { put_rows_tiles(x, k, to) };
    } else if level >= SimdLevel::Avx2Fma {
        // SAFETY: kernels exist only for levels that the processor has.
        return unsafe { put_rows_avx2(level, x, k, to) };
    }
    put_all(level, x, k, to);
}

/// A group at a time, for TDPBF16PS.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
fn put_rows_tiles(x: &[f32], k: usize, block: &mut [u32]) {
    let height = x.len() / k.max(1);
    for (row, x) in x.chunks_exact(k.max(1)).enumerate() {
        for (x, to) in x.chunks(GROUP).zip(block.chunks_exact_mut(PAIRS * height)) {
            put_group(x, &mut to[row * PAIRS..(row + 1) * PAIRS]);
        }
    }
}

/// The words of a group in their own order, rounded to nearest even as [`bf16::from_f32`] does.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn put_group(x: &[f32], to: &mut [u32]) {
    use crate::cpu::simd::avx512::round_bits;
    use std::arch::x86_64::*;
    let halves = [0, 16].map(|first| {
        let mask = ((1u32 << x.len().saturating_sub(first).min(16)) - 1) as u16;
        // SAFETY: the mask ends with `x`.
        let x = unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr().wrapping_add(first)) };
        let bits = _mm512_castps_si512(x);
        let nearest = round_bits(bits);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let rounded = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x40_0000));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    });
    let words = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1]);
    assert_eq!(to.len(), PAIRS);
    // SAFETY: room for a vector.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
}

/// Eight elements at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn put_rows_avx2(level: SimdLevel, x: &[f32], k: usize, block: &mut [u32]) {
    let (wide, height) = (pair_words(level), x.len() / k.max(1));
    for (row, x) in x.chunks_exact(k.max(1)).enumerate() {
        for (x, to) in x.chunks(GROUP).zip(block.chunks_exact_mut(PAIRS * wide * height)) {
            let mut group = [0.0; GROUP];
            group[..x.len()].copy_from_slice(x);
            for (eight, x) in group.as_chunks::<8>().0.iter().enumerate() {
                for (i, pair) in pairs_of_eight(x).into_iter().enumerate() {
                    let at = (eight * 4 + i) * height + row;
                    let [first, second] = [pair as u32, (pair >> 32) as u32];
                    if wide == 1 {
                        to[at] = first | second >> 16;
                    } else {
                        to[at * 2..at * 2 + 2].copy_from_slice(&[first, second]);
                    }
                }
            }
        }
    }
}

/// The four pairs of eight elements, rounded to nearest even as [`bf16::from_f32`] does: the first of each in the low half, each as f32.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn pairs_of_eight(x: &[f32; 8]) -> [u64; 4] {
    use std::arch::x86_64::*;
    // SAFETY: eight f32.
    let x = unsafe { _mm256_loadu_ps(x.as_ptr()) };
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    let rounded = _mm256_blendv_epi8(nearest, _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000)), nan);
    let rounded = _mm256_and_si256(rounded, _mm256_set1_epi32(0xffff_0000u32.cast_signed()));
    // Within halves: 0 2 1 3.
    let pairs = _mm256_shuffle_epi32::<0b11_01_10_00>(rounded);
    let mut out = [0; 4];
    // SAFETY: room for a vector.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), pairs) };
    out
}

#[inline(always)]
fn put_all(level: SimdLevel, x: &[f32], k: usize, block: &mut [u32]) {
    let (wide, height, tiles) = (pair_words(level), x.len() / k.max(1), has_tiles(level));
    for (row, x) in x.chunks_exact(k.max(1)).enumerate() {
        for (x, to) in x.chunks(GROUP).zip(block.chunks_exact_mut(PAIRS * wide * height)) {
            let mut group = [0.0; GROUP];
            group[..x.len()].copy_from_slice(x);
            if tiles {
                to[row * PAIRS..(row + 1) * PAIRS].copy_from_slice(&pairs(&group, true));
                continue;
            }
            for (pair, word) in pairs(&group, false).into_iter().enumerate() {
                let at = (pair * height + row) * wide;
                if wide == 1 {
                    to[at] = word;
                } else {
                    [to[at], to[at + 1]] = [word & 0xffff_0000, word << 16];
                }
            }
        }
    }
}

/// The pair words of a group, rounded to nearest even as [`bf16::from_f32`] does. Loops over whole arrays, which compile to vectors.
#[inline(always)]
fn pairs(group: &[f32; GROUP], tiles: bool) -> [u32; PAIRS] {
    let mut rounded = [0u32; GROUP];
    for (rounded, x) in rounded.iter_mut().zip(group) {
        let bits = x.to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        *rounded = if x.is_nan() { bits | 0x40_0000 } else { nearest };
    }
    let mut pairs = [0; PAIRS];
    for (pair, word) in pairs.iter_mut().enumerate() {
        let [low, high] = halves_of(pair, tiles);
        *word = rounded[high] & 0xffff_0000 | rounded[low] >> 16;
    }
    pairs
}
