//! Operands of known answers of attention.

use super::power;
use crate::cpu::buffer;
use crate::device::DeviceError;
use crate::host::{KvStep, Scores};
use crate::kv::KvBinding;
use crate::numerics::round;
use crate::step::StepSegment;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout, KvPoolMap};

/// Tokens of a block of the pool.
const BLOCK: usize = 16;
/// Query heads of the one KV head.
const HEADS: usize = 3;

/// Rows that attend to numbers which look random, so that each element of the result depends on the order of its sums. Some elements show
/// more:
///
/// - Element 1 of keys is subnormal, and of queries large: the scores show whether it counts. Element 1 of values is about the least normal
///   number.
/// - Element 2 makes the scores of some tokens so low that their weights are near 2^-121, or zero. Only their values count in element 2.
/// - Element 3 of the value that only the last row attends to is infinite.
///
/// Tokens that no row attends to are NaN.
pub(in crate::cpu) struct Attention {
    pub(in crate::cpu) dtype: Dtype,
    /// Elements of a head: at least 4.
    pub(in crate::cpu) dim: usize,
    /// Of the first row.
    pub(in crate::cpu) position: usize,
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) window: Option<usize>,
    /// The right [`Attention::digest`].
    pub(in crate::cpu) expected: u64,
}

impl Attention {
    /// Whether `attend` gives the known answers of all cases.
    ///
    /// # Errors
    /// If there is no memory for keys and values.
    pub(in crate::cpu) fn all_right(
        cases: &[Self],
        attend: impl Fn(KvStep<'_>, &[f32], Scores<'_>, &mut [f32]),
    ) -> Result<bool, DeviceError> {
        for case in cases {
            if case.digest(&attend)? != case.expected {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A digest of all bits of the result, in which every NaN is the same.
    ///
    /// # Errors
    /// As [`Attention::all_right`].
    pub(in crate::cpu) fn digest(
        &self,
        attend: impl FnOnce(KvStep<'_>, &[f32], Scores<'_>, &mut [f32]),
    ) -> Result<u64, DeviceError> {
        let scores = Scores { scale: 0.3, window: self.window, soft_cap: None, sinks: None };
        let mut numbers = Numbers(1);
        let (kv, table) = self.pool(scores, &mut numbers)?;
        let q: Vec<f32> = (0..self.rows * HEADS).flat_map(|_| self.query(&mut numbers)).collect();
        let mut out = vec![f32::NAN; q.len()];
        let segments = [StepSegment { position: self.position, rows: self.rows, table }];
        attend(KvStep { kv: &kv, layer: 0, segments: &segments }, &q, scores, &mut out);
        let bits = out.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() });
        // FNV-1a, by words.
        Ok(bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// Keys and values of the blocks that the rows attend to.
    fn pool(&self, scores: Scores<'_>, numbers: &mut Numbers) -> Result<(KvBinding, BlockTable), DeviceError> {
        let (seen, end) = (scores.first(self.position), self.position + self.rows);
        let (first, blocks) = (seen / BLOCK, end.div_ceil(BLOCK) - seen / BLOCK);
        let map = KvLayout::llama(BLOCK as u32, 1, 1, self.dim as u32, self.dtype)
            .and_then(|layout| KvPoolMap::try_new(layout, blocks as u32))
            .map_err(|error| DeviceError::Failed(error.to_string()))?;
        let memory = buffer::pool_of(map.bytes())?;
        let kv = KvBinding::try_new(memory.clone(), &map, 0)?;
        let mut bytes = Vec::new();
        for token in first * BLOCK..(first + blocks) * BLOCK {
            for (plane, element) in kv.planes().into_iter().zip([key, value]) {
                let (is_seen, is_last) = ((seen..end).contains(&token), token + 1 == end);
                let element = |d| if is_seen { element(token, is_last, d, numbers) } else { f32::NAN };
                bytes.clear();
                round::encode(self.dtype, &(0..self.dim).map(element).collect::<Vec<f32>>(), &mut bytes);
                memory.copy_in(kv.offset(0, plane, BlockId((token / BLOCK - first) as u32), token % BLOCK), &bytes);
            }
        }
        Ok((kv, BlockTable { first, blocks: (0..blocks as u32).map(BlockId).collect() }))
    }

    fn query(&self, numbers: &mut Numbers) -> Vec<f32> {
        let element = |d: usize| match d {
            1 => power(126),
            2 => 8.0,
            _ => numbers.next(-2),
        };
        (0..self.dim).map(element).collect()
    }
}

/// Element `d` of a key.
fn key(token: usize, _is_last: bool, d: usize, numbers: &mut Numbers) -> f32 {
    match (d, token % 8) {
        (1, _) => power(-130 + (token % 3) as i32),
        (2, 5) => -35.0,
        (2, 6) => -64.0,
        (2, _) => 0.0,
        _ => numbers.next(-3),
    }
}

/// Element `d` of a value.
fn value(token: usize, is_last: bool, d: usize, numbers: &mut Numbers) -> f32 {
    match (d, token % 8) {
        (1, _) => numbers.next(0) * power(-126),
        (2, 5 | 6) => power(60),
        (2, _) => 0.0,
        (3, _) if is_last => f32::INFINITY,
        _ => numbers.next(-4),
    }
}

/// Numbers that look random, the same in every process.
struct Numbers(u32);

impl Numbers {
    /// A number of any sign and four exponents from `least` on.
    fn next(&mut self, least: i32) -> f32 {
        let mut half = || {
            self.0 = self.0.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_add(0x85eb_ca77);
            self.0 >> 16
        };
        let bits = half() << 16 | half();
        let exponent = (127 + least) as u32 + (bits >> 23 & 3);
        f32::from_bits(bits & 0x807f_ffff | exponent << 23)
    }
}
