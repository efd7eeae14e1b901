//! The packed form. A panel of 16 features is one sequential stream of *groups*: what shares a stored block, 1 or 8 blocks of 32. A group is a header with
//! the scales, then its blocks. Integers are in *words* of 4 k: word `j` of 8 holds `k = 4j..4j + 4` of one feature, a vector of words those of 16
//! features. Bytes, for 16 features:
//!
//! | Format | Header | Block | To the file's |
//! |---|---|---|---|
//! | Q4_0 | d 32 | nibbles 256 | 1 |
//! | Q4_1 | d 32, m 32 | nibbles 256 | 1 |
//! | Q8_0 | d 32 | bytes 512 | 1 |
//! | Q4_K | d 32, -dmin 32, 8 x (sc 16, m 16) | nibbles 256 | 1.028 |
//! | Q5_K | the same | nibbles 256, fifth bits 64 | 1.023 |
//! | Q6_K | d 32, unused 32, 8 x (first sc 16, second sc 16) | nibbles 256, high bits 2 x 64 | 1.010 |
//!
//! Vector `c` of 4 of nibbles has word `c` in the low and word `c + 4` in the high nibbles, which is GGML's own order in Q4_0 and Q4_1: packing
//! these moves 32-bit words only. A byte of the fifth bits has in bit `j` that of word `j`; a byte of the high bits of Q6_K has two bits for each
//! of words 0 to 3 (first vector) or 4 to 7. Q8_0 is stored with 128 added (the other formats are unsigned already).

use super::formats::{self, Block, Format, half_at, q6_scales, scale_min};
use super::{BLOCK, PANEL, Shared, Threads};
use crate::cpu::buffer::Buffer;
use crate::device::DeviceError;
use half::f16;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where things are in a group of a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Blocks of 32 in a group.
    pub(crate) blocks: usize,
    /// Bytes of the header.
    pub(crate) header: usize,
    /// Bytes of a block.
    pub(crate) block: usize,
}

impl Layout {
    /// The layout of a format.
    pub(crate) const fn of(format: Format) -> Self {
        let (blocks, header, block) = match format {
            Format::Q4_0 => (1, 32, 256),
            Format::Q4_1 => (1, 64, 256),
            Format::Q8_0 => (1, 32, 512),
            Format::Q4K => (8, 320, 256),
            Format::Q5K => (8, 320, 320),
            Format::Q6K => (8, 320, 384),
        };
        Self { blocks, header, block }
    }

    /// Cache lines of a group for each of its blocks.
    pub(crate) const fn lines(self) -> usize {
        self.group().div_ceil(64 * self.blocks)
    }

    /// Bytes of a group.
    pub(crate) const fn group(self) -> usize {
        self.header + self.blocks * self.block
    }
}

/// A weight `[n, k]` as panels of 16 features. Features beyond n have scale 0.
#[derive(Debug)]
pub(crate) struct Weights {
    format: Format,
    n: usize,
    k: usize,
    bytes: Buffer,
}

impl Weights {
    /// Packs `stored`, n rows of k elements as in the file.
    ///
    /// # Errors
    /// If a scale or minimum is not finite, or the system gives no memory.
    ///
    /// # Panics
    /// If `stored` is not n rows of whole blocks.
    pub(crate) fn pack(
        threads: &Threads,
        format: Format,
        n: usize,
        k: usize,
        stored: &[u8],
    ) -> Result<Self, DeviceError> {
        let mut weights = Self::zeroed(format, n, k)?;
        let (panels, panel_bytes, row_bytes) = (weights.panels(), weights.panel_bytes(), stored.len() / n.max(1));
        assert_eq!(Some(stored.len()), format.stored().row_bytes(k).map(|row| row * n), "[{n}, {k}] in {format:?}");
        let (to, finite) = (Shared(weights.bytes.as_mut_ptr().cast::<u8>()), AtomicBool::new(true));
        let per_task = (64usize << 10).div_ceil(panel_bytes.max(1));
        threads.run(panels.div_ceil(per_task), &|task| {
            for panel in task * per_task..((task + 1) * per_task).min(panels) {
                let rows = &stored[panel * PANEL * row_bytes..((panel + 1) * PANEL).min(n) * row_bytes];
                // SAFETY: the panel's own bytes, of one task.
                let to = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * panel_bytes), panel_bytes) };
                if !pack_panel(format, rows, row_bytes, to) {
                    finite.store(false, Ordering::Relaxed);
                }
            }
        });
        if finite.into_inner() {
            return Ok(weights);
        }
        Err(DeviceError::Shape { op: "load", message: "a quantized weight has a scale that is not finite".into() })
    }

    /// Weights of this shape that are all zero.
    ///
    /// # Errors
    /// If the system gives no memory.
    ///
    /// # Panics
    /// If k elements are not whole blocks.
    pub(crate) fn zeroed(format: Format, n: usize, k: usize) -> Result<Self, DeviceError> {
        assert!(format.stored().row_bytes(k).is_some(), "{k} elements are not whole blocks of {format:?}");
        let mut weights = Self { format, n, k, bytes: Buffer::zeroed(0) };
        weights.bytes = Buffer::for_weights((weights.panels() * weights.panel_bytes()).div_ceil(size_of::<u32>()))?;
        Ok(weights)
    }

    /// All packed bytes, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.bytes_mut()
    }

    /// The stored format.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// Output features.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// All packed bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    fn panel_bytes(&self) -> usize {
        let layout = Layout::of(self.format);
        self.k / BLOCK / layout.blocks * layout.group()
    }

    /// The bytes of one panel.
    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.bytes.bytes()[panel * self.panel_bytes()..(panel + 1) * self.panel_bytes()]
    }

    /// Writes feature `feature`, `[k]`, expanded as GGML does, to `out`: the embedding of a token.
    ///
    /// # Panics
    /// If there is no such feature or `out` is not of length k.
    pub(crate) fn row(&self, feature: usize, out: &mut [f32]) {
        assert!(feature < self.n && out.len() == self.k, "feature {feature}, {} of {}", out.len(), self.k);
        let panel = self.panel(feature / PANEL);
        for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            unpack(self.format, panel, block, feature % PANEL).expand(self.format, out);
        }
    }
}

/// Packs the at most 16 rows of `stored`. False if a scale is not finite.
fn pack_panel(format: Format, stored: &[u8], row_bytes: usize, to: &mut [u8]) -> bool {
    // One copy of the loops for each format, so that their branches on it are gone.
    match format {
        Format::Q4_0 => pack_rows::<0>(Format::Q4_0, stored, row_bytes, to),
        Format::Q4_1 => pack_rows::<1>(Format::Q4_1, stored, row_bytes, to),
        Format::Q8_0 => pack_rows::<2>(Format::Q8_0, stored, row_bytes, to),
        Format::Q4K => pack_rows::<3>(Format::Q4K, stored, row_bytes, to),
        Format::Q5K => pack_rows::<4>(Format::Q5K, stored, row_bytes, to),
        Format::Q6K => pack_rows::<5>(Format::Q6K, stored, row_bytes, to),
    }
}

/// `COPY` only tells instances apart; the format is a constant of each call.
#[inline(always)]
fn pack_rows<const COPY: usize>(format: Format, stored: &[u8], row_bytes: usize, to: &mut [u8]) -> bool {
    let (_, size) = format.stored().block();
    let layout = Layout::of(format);
    let mut finite = true;
    for (group, to) in to.chunks_exact_mut(layout.group()).enumerate() {
        let (header, blocks) = to.split_at_mut(layout.header);
        for (f, row) in stored.chunks_exact(row_bytes).enumerate() {
            let b = &row[group * size..][..size];
            finite &= put_header(format, b, f, header);
            for (sub, to) in blocks.chunks_exact_mut(layout.block).enumerate() {
                put_block(format, b, sub, f, to);
            }
        }
    }
    finite
}

#[inline(always)]
fn put_header(format: Format, b: &[u8], f: usize, header: &mut [u8]) -> bool {
    let mut half = |at: usize, value: f16| {
        header[at + 2 * f..at + 2 * f + 2].copy_from_slice(&value.to_le_bytes());
        value.is_finite()
    };
    match format {
        Format::Q4_0 | Format::Q8_0 => half(0, half_at(b, 0)),
        Format::Q4_1 => half(0, half_at(b, 0)) & half(32, half_at(b, 2)),
        Format::Q4K | Format::Q5K => {
            let finite = half(0, half_at(b, 0)) & half(32, -half_at(b, 2));
            for sub in 0..8 {
                let [scale, min] = scale_min(sub, &b[4..16]);
                (header[64 + sub * 32 + f], header[64 + sub * 32 + 16 + f]) = (scale, min);
            }
            finite
        }
        Format::Q6K => {
            let finite = half(0, half_at(b, 208));
            for sub in 0..8 {
                let [first, second] = q6_scales(b, sub);
                (header[64 + sub * 32 + f], header[64 + sub * 32 + 16 + f]) = (first, second);
            }
            finite
        }
    }
}

#[inline(always)]
fn put_block(format: Format, b: &[u8], sub: usize, f: usize, to: &mut [u8]) {
    let mut put = |vector: usize, bytes: &[u8]| to[vector * 64 + f * 4..][..4].copy_from_slice(bytes);
    match format {
        Format::Q4_0 => (0..4).for_each(|c| put(c, &b[2 + c * 4..][..4])),
        Format::Q4_1 => (0..4).for_each(|c| put(c, &b[4 + c * 4..][..4])),
        Format::Q8_0 => {
            let ints = formats::ints(format, b, 0);
            (0..8).for_each(|j| put(j, &ints[j * 4..][..4]));
        }
        Format::Q4K | Format::Q5K | Format::Q6K => {
            let ints = formats::ints(format, b, sub);
            let word = |j: usize| u32::from_le_bytes([ints[j * 4], ints[j * 4 + 1], ints[j * 4 + 2], ints[j * 4 + 3]]);
            for c in 0..4 {
                put(c, &(word(c) & 0x0f0f_0f0f | (word(c + 4) & 0x0f0f_0f0f) << 4).to_le_bytes());
            }
            if format == Format::Q5K {
                let bits = (0..8).fold(0, |bits, j| bits | (word(j) >> 4 & 0x0101_0101) << j);
                put(4, &bits.to_le_bytes());
            }
            if format == Format::Q6K {
                for half in 0..2 {
                    let bits = (0..4).fold(0, |bits, j| bits | (word(half * 4 + j) >> 4 & 0x0303_0303) << (2 * j));
                    put(4 + half, &bits.to_le_bytes());
                }
            }
        }
    }
}

/// Block `block` of feature `f` of a panel.
pub(crate) fn unpack(format: Format, panel: &[u8], block: usize, f: usize) -> Block {
    let layout = Layout::of(format);
    let (header, blocks) = panel[block / layout.blocks * layout.group()..][..layout.group()].split_at(layout.header);
    let sub = block % layout.blocks;
    let from = &blocks[sub * layout.block..][..layout.block];
    let mut ints = [0; BLOCK];
    for (i, q) in ints.iter_mut().enumerate() {
        let (j, t) = (i / 4, f * 4 + i % 4);
        *q = match format {
            Format::Q8_0 => from[j * 64 + t],
            _ => from[j % 4 * 64 + t] >> (j / 4 * 4) & 15,
        };
        match format {
            Format::Q5K => *q |= (from[256 + t] >> j & 1) << 4,
            Format::Q6K => *q |= (from[256 + j / 4 * 64 + t] >> (j % 4 * 2) & 3) << 4,
            _ => {}
        }
    }
    let (d, m) = (half_at(header, 2 * f).to_f32(), || half_at(header, 32 + 2 * f).to_f32());
    let bytes = || [header[64 + sub * 32 + f], header[64 + sub * 32 + 16 + f]];
    let (scales, min) = match format {
        Format::Q4_0 | Format::Q8_0 => ([d; 2], 0.0),
        Format::Q4_1 => ([d; 2], m()),
        Format::Q4K | Format::Q5K => ([d * f32::from(bytes()[0]); 2], m() * f32::from(bytes()[1])),
        Format::Q6K => (bytes().map(|s| d * f32::from(s as i8)), 0.0),
    };
    Block { ints, scales, min }
}
