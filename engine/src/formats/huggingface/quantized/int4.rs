//! Weights in 4 bits of GPTQ and AWQ: `(q - z) * s`, with a scale and a zero point for a group of input features.
//!
//! `q - z` has 5 bits and a sign, so Q8_0 holds each value exactly, and Q4_0 does if every zero point is 8. Both have a scale in f16 for 32
//! input features. Where that does not fit, the values become f32: scales that are no numbers of f16, groups that 32 does not divide, and
//! input features in an order of their own (`desc_act`).

use super::{Numbers, Slot};
use crate::formats::StoredTensor;
use baton_kernels::storage::StorageFormat;
use half::f16;
use safetensors::Dtype;
use std::ops::Range;

/// Integers of a word.
const PER_WORD: usize = 8;
/// Input features that share a scale in Q4_0 and Q8_0.
const BLOCK: usize = 32;
/// The zero point that Q4_0 implies.
const MIDDLE: u8 = 8;
/// Place in a word of each of eight output features (AutoAWQ's `gemm`).
const AWQ_PLACES: [usize; PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

/// How eight integers make a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Packing {
    /// Of weights those of eight input features, of zero points those of eight output features.
    Gptq {
        /// Whether zero points are stored less one.
        less_one: bool,
    },
    /// Those of eight output features, in an order of their own.
    Awq,
}

impl Packing {
    /// `[k, n]` of a weight of so many words.
    pub(super) fn unpacked(self, [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
        match self {
            Self::Gptq { .. } => Some([rows.checked_mul(PER_WORD)?, columns]),
            Self::Awq => Some([rows, columns.checked_mul(PER_WORD)?]),
        }
    }
}

/// Checks types and shapes of what belongs to a weight `[k, n]`.
pub(super) fn check(
    [k, n]: [usize; 2],
    group: usize,
    scales: &[usize],
    zero_points: &Slot,
    groups: Option<&Slot>,
) -> Result<(), String> {
    let count = k.div_ceil(group.max(1));
    if scales != [count, n] {
        return Err(format!("its scales have shape {scales:?}; {:?} is needed", [count, n]));
    }
    let needed = [count, n / PER_WORD];
    if zero_points.shape != needed || !n.is_multiple_of(PER_WORD) || zero_points.dtype != Dtype::I32 {
        let Slot { dtype, shape, .. } = zero_points;
        return Err(format!("its zero points are {dtype:?} of shape {shape:?}; I32 of {needed:?} is needed"));
    }
    match groups {
        Some(Slot { dtype, shape, .. }) if *shape != [k] || *dtype != Dtype::I32 => {
            Err(format!("its g_idx is {dtype:?} of shape {shape:?}; I32 of [{k}] is needed"))
        }
        _ => Ok(()),
    }
}

/// The bytes of a linear `[n, k]`.
pub(super) struct Matrix<'a> {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) group: usize,
    pub(super) packing: Packing,
    pub(super) weight: &'a [u8],
    pub(super) zero_points: &'a [u8],
    pub(super) scales: Numbers<'a>,
    /// The group of each input feature, if the file has it.
    pub(super) groups: Option<&'a [u8]>,
}

fn word(bytes: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

impl Matrix<'_> {
    fn int(&self, k: usize, n: usize) -> u8 {
        let (word, place) = match self.packing {
            Packing::Gptq { .. } => (word(self.weight, k / PER_WORD * self.n + n), k % PER_WORD),
            Packing::Awq => (word(self.weight, k * (self.n / PER_WORD) + n / PER_WORD), AWQ_PLACES[n % PER_WORD]),
        };
        (word >> (4 * place)) as u8 & 15
    }

    /// Those of 32 input features.
    fn ints(&self, block: usize, n: usize) -> [u8; BLOCK] {
        let mut ints = [0; BLOCK];
        match self.packing {
            Packing::Gptq { .. } => {
                for (i, ints) in ints.chunks_exact_mut(PER_WORD).enumerate() {
                    let word = word(self.weight, (block * BLOCK / PER_WORD + i) * self.n + n);
                    ints.iter_mut().enumerate().for_each(|(place, int)| *int = (word >> (4 * place)) as u8 & 15);
                }
            }
            Packing::Awq => {
                let (words, shift) = (self.n / PER_WORD, 4 * AWQ_PLACES[n % PER_WORD]);
                let first = block * BLOCK * words + n / PER_WORD;
                ints.iter_mut().enumerate().for_each(|(i, int)| {
                    *int = (word(self.weight, first + i * words) >> shift) as u8 & 15;
                });
            }
        }
        ints
    }

    fn zero_point(&self, group: usize, n: usize) -> u8 {
        let word = word(self.zero_points, group * (self.n / PER_WORD) + n / PER_WORD);
        match self.packing {
            Packing::Gptq { less_one } => (word >> (4 * (n % PER_WORD))) as u8 % 16 + u8::from(less_one),
            Packing::Awq => (word >> (4 * AWQ_PLACES[n % PER_WORD])) as u8 % 16,
        }
    }

    fn scale(&self, group: usize, n: usize) -> f32 {
        self.scales.at(group * self.n + n)
    }

    /// The groups of input features, if they are not in order.
    fn order(&self) -> Result<Option<Vec<usize>>, String> {
        let Some(groups) = self.groups else { return Ok(None) };
        let count = self.k.div_ceil(self.group);
        let order: Vec<usize> = (0..self.k).map(|k| word(groups, k) as usize).collect();
        if let Some(group) = order.iter().find(|group| **group >= count) {
            return Err(format!("its g_idx has group {group} of {count}"));
        }
        let in_order = order.iter().enumerate().all(|(k, group)| *group == k / self.group);
        Ok((!in_order).then_some(order))
    }

    /// Some rows, in the smallest format that holds them exactly.
    pub(super) fn read(&self, rows: Range<usize>) -> Result<StoredTensor<'static>, String> {
        let order = self.order()?;
        let all = || (0..self.k.div_ceil(self.group)).flat_map(|group| rows.clone().map(move |n| (group, n)));
        if all().any(|(group, n)| !self.scale(group, n).is_finite()) {
            return Err("it has a scale that is not finite".into());
        }
        // 16 is what is stored of 0 in files of some writers, and of 16 in those of others.
        if all().any(|(group, n)| self.zero_point(group, n) > 15) {
            return Err("it has a stored zero point of 15, which readers of this checkpoint_format understand \
                        in different ways: convert it to gptq_v2"
                .into());
        }
        let is_half = |(group, n)| f16::from_f32(self.scale(group, n)).to_f32() == self.scale(group, n);
        let whole_blocks = self.k.is_multiple_of(BLOCK) && self.group.is_multiple_of(BLOCK);
        if order.is_some() || !whole_blocks || !all().all(is_half) {
            return Ok(self.numbers(rows, order.as_deref()));
        }
        let format = match all().all(|(group, n)| self.zero_point(group, n) == MIDDLE) {
            true => StorageFormat::Q4_0,
            false => StorageFormat::Q8_0,
        };
        Ok(StoredTensor { format, bytes: self.blocks(rows, format).into() })
    }

    fn numbers(&self, rows: Range<usize>, order: Option<&[usize]>) -> StoredTensor<'static> {
        let mut out = Vec::with_capacity(rows.len() * self.k * size_of::<f32>());
        for n in rows {
            for k in 0..self.k {
                let group = order.map_or(k / self.group, |order| order[k]);
                let int = i16::from(self.int(k, n)) - i16::from(self.zero_point(group, n));
                out.extend((f32::from(int) * self.scale(group, n)).to_le_bytes());
            }
        }
        StoredTensor { format: StorageFormat::F32, bytes: out.into() }
    }

    /// Blocks of Q4_0 or Q8_0. 32 input features of all rows at a time, as the words lie.
    fn blocks(&self, rows: Range<usize>, format: StorageFormat) -> Vec<u8> {
        let (row_blocks, (_, size)) = (self.k / BLOCK, format.block());
        let mut out = vec![0; rows.len() * row_blocks * size];
        for block in 0..row_blocks {
            let group = block * BLOCK / self.group;
            for (row, n) in rows.clone().enumerate() {
                let to = &mut out[(row * row_blocks + block) * size..][..size];
                to[..2].copy_from_slice(&f16::from_f32(self.scale(group, n)).to_le_bytes());
                let ints = self.ints(block, n);
                if format == StorageFormat::Q4_0 {
                    let (low, high) = ints.split_at(BLOCK / 2);
                    to[2..].iter_mut().zip(low.iter().zip(high)).for_each(|(to, (low, high))| *to = low | high << 4);
                } else {
                    let zero = self.zero_point(group, n);
                    to[2..].iter_mut().zip(ints).for_each(|(to, int)| *to = int.wrapping_sub(zero));
                }
            }
        }
        out
    }
}
