//! The tokens that filters choose among: few of the vocabulary.

use super::passes::{BLOCK, Gather, Parts, Scale, Shares};
use crate::cpu::simd::{WIDEST, Width};
use crate::sampling::order::{key, ordered};
use crate::sampling::shares::part;
use crate::sampling::typical;
use std::ops::Range;

/// Exponents, in units of the temperature below the best, at which the search for a limit goes on if the tokens above it are not enough.
const RINGS: [f32; 4] = [4.0, 8.0, 12.0, 18.0];
/// The last of them for shares: below, they are 0. With rounding, `e^-40` is far less than 2^-40.
const LAST: f32 = 40.0;
/// Parts into which a ring of many tokens is cut.
const PARTS: usize = 256;
/// Tokens of a ring that is cut.
const MANY: usize = 96;
/// Bits of a digit of the selection.
const DIGIT: u32 = 8;

/// What a limit is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// Tokens.
    Count,
    Share,
}

/// The logits of a row, and the largest of each block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    pub(super) logits: &'a [f32],
    pub(super) maxima: &'a [f32],
    pub(super) best: f32,
}

/// The last token that a filter keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    logit: f32,
    token: u32,
}

impl Limit {
    /// Keeps every token.
    const NONE: Self = Self { logit: f32::NEG_INFINITY, token: u32::MAX };

    #[inline(always)]
    fn keeps(self, logit: f32, token: u32) -> bool {
        (logit > self.logit) | ((logit == self.logit) & (token <= self.token))
    }
}

/// Tokens with their logits and shares. Lists have room for the vocabulary, and for a vector more.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    tokens: Vec<u32>,
    logits: Vec<f32>,
    shares: Vec<u64>,
    /// The part of each in its ring, if that is cut.
    parts: Vec<u32>,
    /// Those that a selection still looks at.
    members: Vec<u32>,
    /// Where each ring ends; within it, ids ascend.
    rings: Vec<usize>,
    /// Sums of shares by block.
    sums: Vec<u64>,
}

impl Candidates {
    /// Makes room for a vocabulary, and forgets all candidates.
    fn clear(&mut self, vocab: usize) {
        let Self { tokens, logits, shares, parts, members, rings, .. } = self;
        if tokens.len() < vocab + WIDEST {
            // Zeroed memory of the system: what no candidate reaches is never resident.
            let len = vocab + WIDEST;
            [*tokens, *parts, *members] = [vec![0; len], vec![0; len], vec![0; len]];
            (*logits, *shares) = (vec![0.0; len], vec![0; len]);
            rings.reserve(RINGS.len() + 1);
        }
        rings.clear();
    }

    fn len(&self) -> usize {
        self.rings.last().copied().unwrap_or(0)
    }

    /// The last of the largest tokens of a row that together reach `enough`, at least 1. The candidates are then all these tokens, and
    /// others.
    pub(super) fn limit(
        &mut self,
        width: Width,
        row: Row<'_>,
        temperature: f32,
        measure: Measure,
        enough: u64,
    ) -> Limit {
        self.clear(row.logits.len());
        let scale = Scale { best: row.best, temperature };
        let last = if measure == Measure::Share { row.best - LAST * temperature } else { f32::NEG_INFINITY };
        let limits = RINGS.into_iter().map(|below| row.best - below * temperature).chain([last]);
        let (mut below, mut reached) = (f32::INFINITY, 0);
        for from in limits {
            let ring = self.gather(width, row, from, below);
            let sum = match measure {
                Measure::Count => ring.len() as u64,
                Measure::Share => self.share(width, scale, ring.clone()),
            };
            if reached + sum >= enough {
                let ends = [from, below.min(row.best)];
                return self.select_ring(width, ring, ends, measure, enough - reached);
            }
            (reached, below) = (reached + sum, from);
        }
        Limit::NONE
    }

    /// Appends a ring.
    fn gather(&mut self, width: Width, row: Row<'_>, from: f32, below: f32) -> Range<usize> {
        let first = self.len();
        let Row { logits, maxima, .. } = row;
        let (tokens, values) = (&mut self.tokens[first..], &mut self.logits[first..]);
        let count = width.run(Gather { logits, maxima, from, below, tokens, values });
        self.rings.push(first + count);
        first..first + count
    }

    /// Computes the shares of a range. Returns their sum.
    fn share(&mut self, width: Width, scale: Scale, range: Range<usize>) -> u64 {
        let vectors = range.start..range.start + range.len().next_multiple_of(WIDEST);
        let (logits, shares) = (&self.logits[vectors.clone()], &mut self.shares[vectors]);
        width.run(Shares { scale, logits, shares });
        self.shares[range].iter().sum()
    }

    /// Computes the shares of all candidates. Returns the sum of those within the limit.
    pub(super) fn share_all(&mut self, width: Width, scale: Scale, limit: Limit) -> u64 {
        self.share(width, scale, 0..self.len());
        self.kept_share(limit)
    }

    /// The last token whose share is at least `least`, that of a token `min_p` as likely as the best. The candidates are then all these tokens,
    /// and others, with their shares.
    pub(super) fn limit_least(&mut self, width: Width, row: Row<'_>, scale: Scale, min_p: f32, least: u64) -> Limit {
        self.clear(row.logits.len());
        // Below the exact bound by more than its rounding and that of shares.
        let below = (1.0 - 1.01 * min_p.ln()).min(LAST);
        let ring = self.gather(width, row, row.best - below * scale.temperature, f32::INFINITY);
        self.share(width, scale, ring.clone());
        let kept = ring.filter(|at| self.shares[*at] >= least).map(|at| self.logits[at]);
        // Equal logits have equal shares.
        Limit { logit: kept.fold(f32::INFINITY, f32::min), token: u32::MAX }
    }

    /// Makes every token with a share a candidate. The limit keeps all.
    pub(super) fn all(&mut self, width: Width, row: Row<'_>, scale: Scale) -> Limit {
        self.clear(row.logits.len());
        let ring = self.gather(width, row, row.best - LAST * scale.temperature, f32::INFINITY);
        self.share(width, scale, ring);
        Limit::NONE
    }

    /// Removes the shares of candidates within the limit that are not typical, as [`typical`] says.
    pub(super) fn keep_typical(&mut self, limit: Limit, scale: Scale, typical_p: f32) {
        let (mut members, mut distances) = (std::mem::take(&mut self.members), std::mem::take(&mut self.parts));
        let (mut count, mut sum, mut weighted) = (0, 0, 0);
        for at in self.kept(limit).filter(|at| self.shares[*at] > 0) {
            let depth = typical::depth(self.logits[at], scale.best, scale.temperature);
            (members[count], distances[at]) = (at as u32, depth);
            count += 1;
            sum += self.shares[at];
            weighted += u128::from(self.shares[at]) * u128::from(depth);
        }
        let (members_there, mean) = (&members[..count], typical::mean(weighted, sum));
        members_there.iter().for_each(|at| distances[*at as usize] = distances[*at as usize].abs_diff(mean));
        let farthest = self.farthest(members_there, &distances, part(typical_p, sum));
        members_there
            .iter()
            .map(|at| *at as usize)
            .filter(|at| distances[*at] > farthest)
            .for_each(|at| self.shares[at] = 0);
        (self.members, self.parts) = (members, distances);
    }

    /// The least distance up to which the shares reach `enough`, which all together do. A radix selection, from the upper digit.
    fn farthest(&self, members: &[u32], distances: &[u32], enough: u64) -> u32 {
        let (mut found, mut known, mut reached) = (0, 0, 0);
        for shift in (0..u32::BITS / DIGIT).rev().map(|digit| digit * DIGIT) {
            let mut sums = [0; 1 << DIGIT];
            for at in members.iter().map(|at| *at as usize).filter(|at| distances[*at] & known == found) {
                sums[(distances[at] >> shift) as usize % sums.len()] += self.shares[at];
            }
            let mut digit = 0;
            while digit + 1 < sums.len() && reached + sums[digit] < enough {
                reached += sums[digit];
                digit += 1;
            }
            found |= (digit as u32) << shift;
            known |= (sums.len() as u32 - 1) << shift;
        }
        found
    }

    /// The sum of the shares within the limit, which are there.
    pub(super) fn kept_share(&self, limit: Limit) -> u64 {
        self.kept(limit).map(|at| self.shares[at]).sum()
    }

    /// The last of the largest candidates within the limit that together reach `enough`; the limit, if they do not.
    pub(super) fn limit_within(&mut self, limit: Limit, measure: Measure, enough: u64) -> Limit {
        let mut members = std::mem::take(&mut self.members);
        let mut count = 0;
        for at in self.kept(limit) {
            members[count] = at as u32;
            count += 1;
        }
        let weight: u64 = match measure {
            Measure::Count => count as u64,
            Measure::Share => members[..count].iter().map(|member| self.shares[*member as usize]).sum(),
        };
        let found = if weight < enough { limit } else { self.select(&mut members[..count], measure, enough) };
        self.members = members;
        found
    }

    fn kept(&self, limit: Limit) -> impl Iterator<Item = usize> {
        (0..self.len()).filter(move |at| limit.keeps(self.logits[*at], self.tokens[*at]))
    }

    /// The last of the largest tokens of a ring between these logits that together reach `enough`.
    fn select_ring(
        &mut self,
        width: Width,
        ring: Range<usize>,
        ends: [f32; 2],
        measure: Measure,
        enough: u64,
    ) -> Limit {
        let mut members = std::mem::take(&mut self.members);
        let [lower, upper] = ends;
        let scale = (PARTS - 1) as f32 / (upper - lower);
        let (mut count, mut enough) = (ring.len(), enough);
        if count > MANY && scale > 0.0 && scale < f32::INFINITY {
            let vectors = ring.start..ring.start + count.next_multiple_of(WIDEST);
            let (logits, parts) = (&self.logits[vectors.clone()], &mut self.parts[vectors]);
            width.run(Parts { logits, upper, scale, parts });
            let (parts, shares) = (&self.parts[ring.clone()], &self.shares[ring.clone()]);
            let mut sums = [0; PARTS];
            match measure {
                Measure::Count => parts.iter().for_each(|part| sums[*part as usize % PARTS] += 1),
                Measure::Share => {
                    parts.iter().zip(shares).for_each(|(part, share)| sums[*part as usize % PARTS] += share);
                }
            }
            let mut part = 0;
            while enough > sums[part] {
                enough -= sums[part];
                part += 1;
            }
            count = 0;
            for (at, of) in ring.zip(parts) {
                members[count] = at as u32;
                count += usize::from(*of as usize == part);
            }
        } else {
            members.iter_mut().zip(ring).for_each(|(member, at)| *member = at as u32);
        }
        let found = self.select(&mut members[..count], measure, enough);
        self.members = members;
        found
    }

    /// The last of the largest members that together reach `enough`. A radix selection like that of the reference, whose first digit begins
    /// where the logits differ.
    fn select(&self, mut members: &mut [u32], measure: Measure, mut enough: u64) -> Limit {
        let weight = |member: u32| if measure == Measure::Share { self.shares[member as usize] } else { 1 };
        let order = |member: u32| ordered(self.logits[member as usize]);
        while let Some(first) = members.first() {
            let (low, high) = members.iter().fold((order(*first), order(*first)), |(low, high), member| {
                (low.min(order(*member)), high.max(order(*member)))
            });
            if low == high {
                // Equal logits: by ascending id, as they were gathered.
                for member in &*members {
                    let at = *member as usize;
                    match enough.checked_sub(weight(*member)) {
                        Some(rest) if rest > 0 => enough = rest,
                        _ => return Limit { logit: self.logits[at], token: self.tokens[at] },
                    }
                }
                break;
            }
            let shift = (u32::BITS - (high - low).leading_zeros()).saturating_sub(DIGIT);
            let digit = |member: u32| ((high - order(member)) >> shift) as usize % (1 << DIGIT);
            let mut sums = [0; 1 << DIGIT];
            members.iter().for_each(|member| sums[digit(*member)] += weight(*member));
            let mut next = 0;
            while next < sums.len() && enough > sums[next] {
                enough -= sums[next];
                next += 1;
            }
            let mut count = 0;
            for at in 0..members.len() {
                let member = members[at];
                members[count] = member;
                count += usize::from(digit(member) == next);
            }
            members = &mut members[..count];
        }
        Limit::NONE
    }

    /// The token of a draw among the candidates within the limit: see [`pick`].
    pub(super) fn pick(&mut self, vocab: usize, limit: Limit, uniform: f64) -> u32 {
        let mut sums = std::mem::take(&mut self.sums);
        sums.clear();
        sums.resize(vocab.div_ceil(BLOCK), 0);
        let len = self.len();
        let (tokens, logits, all) = (&self.tokens[..len], &self.logits[..len], &self.shares[..len]);
        // Ids ascend in a ring, so that many tokens of one block follow another: their sum stays in a register.
        let (mut block, mut sum) = (0, 0);
        for ((token, logit), share) in tokens.iter().zip(logits).zip(all) {
            let of = *token as usize / BLOCK;
            if of != block {
                sums[block] += sum;
                (block, sum) = (of, 0);
            }
            sum += if limit.keeps(*logit, *token) { *share } else { 0 };
        }
        sums[block] += sum;
        let (block, rest) = pick(&sums, target(sums.iter().sum(), uniform));
        self.sums = sums;
        // The block's tokens are together in each ring.
        let (mut shares, mut first) = ([0; BLOCK], 0);
        for end in &self.rings {
            let ring = &self.tokens[first..*end];
            let begin = first + ring.partition_point(|token| (*token as usize) < block * BLOCK);
            for at in (begin..*end).take_while(|at| self.tokens[*at] as usize / BLOCK == block) {
                if limit.keeps(self.logits[at], self.tokens[at]) {
                    shares[self.tokens[at] as usize % BLOCK] = self.shares[at];
                }
            }
            first = *end;
        }
        (block * BLOCK + pick(&shares, rest).0) as u32
    }

    /// The candidates within the limit, most likely first.
    pub(super) fn sorted(&self, limit: Limit) -> Vec<u32> {
        let mut keys: Vec<u64> = self.kept(limit).map(|at| key(self.logits[at], self.tokens[at])).collect();
        keys.sort_unstable_by(|a, b| b.cmp(a));
        keys.into_iter().map(|key| !(key as u32)).collect()
    }
}

#[cfg(test)]
impl Candidates {
    /// Sizes of all memory.
    pub(super) fn capacities(&self) -> [usize; 7] {
        let Self { tokens, logits, shares, parts, members, rings, sums } = self;
        let [tokens, parts, members] = [tokens, parts, members].map(Vec::capacity);
        [tokens, parts, members, logits.capacity(), shares.capacity(), rings.capacity(), sums.capacity()]
    }
}

/// `floor(uniform * sum)`.
pub(super) fn target(sum: u64, uniform: f64) -> u64 {
    // 2^53: `uniform` is a multiple of its inverse, so the product is exact.
    ((u128::from((uniform * 9_007_199_254_740_992.0) as u64) * u128::from(sum)) >> 53) as u64
}

/// The first share at which the running sum exceeds the target, and what is left of the target before it.
pub(super) fn pick(shares: &[u64], mut target: u64) -> (usize, u64) {
    for (at, share) in shares.iter().enumerate() {
        if *share > target {
            return (at, target);
        }
        target -= share;
    }
    unreachable!("the target is below the sum")
}
