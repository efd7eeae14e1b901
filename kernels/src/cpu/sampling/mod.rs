//! Sampling on the CPU: the bits of [`crate::sampling`], with vectors, without sorting a vocabulary, and rows shared among threads.
//!
//! Shares are whole numbers, so their sums are exact in any order: a row is summed by blocks, and a draw first finds its block. Min-p, top-k and
//! top-p look at the tokens near the best only, and at more if those do not suffice; typical tokens are found among all that these keep.

mod candidates;
mod passes;
#[cfg(test)]
mod tests;

use super::simd::Width;
use super::{CpuKernels, Threads};
use crate::sampling::shares::{least_share, part};
use crate::sampling::{Draw, SampleError, Sampled, check_finite, log_total};
use crate::step::RowSampler;
use baton_types::{SamplingParams, TokenId, TokenLogprobs};
use candidates::{Candidates, Measure, Row, pick, target};
use parking_lot::Mutex;
use passes::{BLOCK, Mask, Maxima, Scale, Shares, Sums};

/// Memory for rows that are sampled at the same time; each thread takes one for a row.
#[derive(Debug, Default)]
pub(super) struct Samplers(Mutex<Vec<Scratch>>);

impl CpuKernels {
    /// Samples with these kernels' threads and memory.
    pub(super) fn rows(&self) -> impl RowSampler {
        Rows { width: Width::of(self.simd), threads: &self.threads, samplers: &self.samplers }
    }
}

struct Rows<'a> {
    width: Width,
    threads: &'a Threads,
    samplers: &'a Samplers,
}

impl RowSampler for Rows<'_> {
    fn sample(&self, draw: &Draw<'_>, logits: &[f32]) -> Result<Sampled, SampleError> {
        let mut scratch = self.samplers.0.lock().pop().unwrap_or_default();
        let sampled = scratch.sample(self.width, draw, logits);
        self.samplers.0.lock().push(scratch);
        sampled
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.threads.run(tasks, task);
    }
}

/// Memory of one row.
#[derive(Debug, Default)]
struct Scratch {
    /// Of the model's logits, the largest of each block.
    maxima: Vec<f32>,
    /// Logits after bias, penalties and allowed tokens, where there are any, and the largest of each block.
    adjusted: Vec<f32>,
    adjusted_maxima: Vec<f32>,
    /// Sums of shares by block.
    sums: Vec<u64>,
    candidates: Candidates,
}

/// Finds the largest logit of each block, and of all.
fn row<'a>(width: Width, logits: &'a [f32], maxima: &'a mut Vec<f32>) -> (Row<'a>, bool) {
    maxima.resize(logits.len().div_ceil(BLOCK), 0.0);
    let (best, finite) = width.run(Maxima { logits, maxima: &mut *maxima });
    (Row { logits, maxima, best }, finite)
}

impl Scratch {
    /// As [`Draw::sample`].
    fn sample(&mut self, width: Width, draw: &Draw<'_>, logits: &[f32]) -> Result<Sampled, SampleError> {
        let (model, finite) = row(width, logits, &mut self.maxima);
        if !finite || logits.is_empty() {
            check_finite(logits)?;
        }
        let mut adjusted = model;
        if draw.adjusts() {
            self.adjusted.clear();
            self.adjusted.extend_from_slice(logits);
            draw.adjust(&mut self.adjusted, |logits, words| width.run(Mask { logits, words }))?;
            adjusted = row(width, &self.adjusted, &mut self.adjusted_maxima).0;
        }
        let mut work = Work { width, sums: &mut self.sums, candidates: &mut self.candidates };
        let (token, sum) = if draw.params.is_greedy() {
            (most_likely(adjusted), None)
        } else {
            work.draw(draw.params, adjusted, draw.uniform())
        };
        let logprobs = draw.params.logprobs.map(|top| {
            // The sum of the draw serves where it is of the same shares.
            let sum = sum.filter(|_| draw.params.temperature == 1.0 && !draw.adjusts());
            work.logprobs(model, sum, token, top as usize)
        });
        Ok(Sampled { token, logprobs })
    }
}

#[cfg(test)]
impl Scratch {
    /// Sizes of all memory.
    fn capacities(&self) -> ([usize; 4], [usize; 7]) {
        let of = |list: &Vec<f32>| list.capacity();
        let of_lists = [of(&self.maxima), of(&self.adjusted), of(&self.adjusted_maxima), self.sums.capacity()];
        (of_lists, self.candidates.capacities())
    }
}

/// The most likely token; ties go to the lowest id.
fn most_likely(row: Row<'_>) -> TokenId {
    let is_best = |logit: &f32| *logit == row.best;
    let block = row.maxima.iter().position(is_best).unwrap_or(0);
    let within = row.logits[block * BLOCK..].iter().position(is_best).unwrap_or(0);
    (block * BLOCK + within) as TokenId
}

struct Work<'a> {
    width: Width,
    sums: &'a mut Vec<u64>,
    candidates: &'a mut Candidates,
}

impl Work<'_> {
    /// The sum of all shares, and those of blocks.
    fn sum(&mut self, row: Row<'_>, scale: Scale) -> u64 {
        self.sums.resize(row.maxima.len(), 0);
        self.width.run(Sums { scale, logits: row.logits, maxima: row.maxima, sums: &mut *self.sums })
    }

    /// The token of a draw, and the sum of all shares where it was needed.
    fn draw(&mut self, params: &SamplingParams, row: Row<'_>, uniform: f64) -> (TokenId, Option<u64>) {
        let SamplingParams { temperature, top_p, top_k, min_p, typical_p, .. } = *params;
        let (scale, vocab) = (Scale { best: row.best, temperature }, row.logits.len());
        let top_k = Some(top_k as usize).filter(|k| (1..vocab).contains(k));
        let (limit, sum) = if min_p > 0.0 {
            let mut limit = self.candidates.limit_least(self.width, row, scale, min_p, least_share(min_p));
            if let Some(k) = top_k {
                limit = self.candidates.limit_within(limit, Measure::Count, k as u64);
            }
            if top_p < 1.0 {
                let kept = self.candidates.kept_share(limit);
                limit = self.candidates.limit_within(limit, Measure::Share, part(top_p, kept));
            }
            (limit, None)
        } else if let Some(k) = top_k {
            let mut limit = self.candidates.limit(self.width, row, temperature, Measure::Count, k as u64);
            let kept = self.candidates.share_all(self.width, scale, limit);
            if top_p < 1.0 {
                limit = self.candidates.limit_within(limit, Measure::Share, part(top_p, kept));
            }
            (limit, None)
        } else if top_p < 1.0 {
            let sum = self.sum(row, scale);
            (self.candidates.limit(self.width, row, temperature, Measure::Share, part(top_p, sum)), Some(sum))
        } else if typical_p < 1.0 {
            (self.candidates.all(self.width, row, scale), None)
        } else {
            let sum = self.sum(row, scale);
            return (self.pick(row, scale, target(sum, uniform)), Some(sum));
        };
        if typical_p < 1.0 {
            self.candidates.keep_typical(limit, scale, typical_p);
        }
        (self.candidates.pick(vocab, limit, uniform), sum)
    }

    /// The token of a draw from all shares, whose sums by block are there.
    fn pick(&self, row: Row<'_>, scale: Scale, target: u64) -> TokenId {
        let (block, rest) = pick(self.sums, target);
        let rest_of_row = &row.logits[block * BLOCK..];
        let count = rest_of_row.len().min(BLOCK);
        let (mut logits, mut shares) = ([f32::NEG_INFINITY; BLOCK], [0; BLOCK]);
        logits[..count].copy_from_slice(&rest_of_row[..count]);
        self.width.run(Shares { scale, logits: &logits, shares: &mut shares });
        (block * BLOCK + pick(&shares, rest).0) as TokenId
    }

    /// As [`crate::sampling::token_logprobs`]; `sum` is that of the shares at temperature 1 if it is known.
    fn logprobs(&mut self, row: Row<'_>, sum: Option<u64>, chosen: TokenId, n: usize) -> TokenLogprobs {
        let sum = sum.unwrap_or_else(|| self.sum(row, Scale { best: row.best, temperature: 1.0 }));
        let total = log_total(row.best, sum);
        let logprob = |token: TokenId| (f64::from(row.logits[token as usize]) - total) as f32;
        let mut top = Vec::new();
        if n > 0 {
            let n = n.min(row.logits.len());
            let limit = self.candidates.limit(self.width, row, 1.0, Measure::Count, n as u64);
            top = self.candidates.sorted(limit).into_iter().map(|token| (token, logprob(token))).collect();
        }
        TokenLogprobs { chosen: logprob(chosen), top }
    }
}
