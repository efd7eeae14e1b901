//! Fits a trace to a given cluster. Real prompts are far longer than a small model's context, and real hours longer than a test.

use crate::bench::trace::{Trace, TraceRequest};
use clap::ValueEnum;

/// Blocks are scaled to a multiple of this, and never below it: KV blocks have at least 16 tokens, and a shorter block could not be
/// shared.
const BLOCK_TOKENS_STEP: u32 = 16;

/// What is done with a request that has more tokens than the context.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
pub(crate) enum TooLong {
    /// Leave the request out.
    #[default]
    Drop,
    /// Cut the end of its prompt, and also its answer if the answer alone is over half of the context.
    Cut,
}

/// How a trace is changed. The default changes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fit {
    /// Requests skipped at the beginning.
    pub(crate) from: usize,
    /// Most requests taken after those skipped.
    pub(crate) limit: usize,
    /// Factor of all lengths, over 0 and at most 1.
    pub(crate) scale: f64,
    /// Most tokens of prompt and answer together.
    pub(crate) context_max: u32,
    pub(crate) too_long: TooLong,
    /// Factor by which time runs faster.
    pub(crate) speed: f64,
}

impl Default for Fit {
    fn default() -> Self {
        Self { from: 0, limit: usize::MAX, scale: 1.0, context_max: u32::MAX, too_long: TooLong::Drop, speed: 1.0 }
    }
}

/// The effect on a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Fitted {
    /// The factor of lengths as applied: new tokens per block to old.
    pub(crate) scale: f64,
    /// Requests left out because they did not fit the context.
    pub(crate) dropped: u64,
    /// Requests that were cut.
    pub(crate) cut: u64,
}

impl Fit {
    /// Selects, scales, cuts and drops, in this order, and makes times relative to the first request that is left.
    pub(crate) fn apply(&self, trace: &Trace) -> (Trace, Fitted) {
        let block_tokens = self.block_tokens(trace.block_tokens);
        let scale = f64::from(block_tokens) / f64::from(trace.block_tokens);
        let mut fitted = Fitted { scale, ..Fitted::default() };
        let mut requests = Vec::new();
        for request in trace.requests.iter().skip(self.from).take(self.limit) {
            let mut request = scaled(request, trace.block_tokens, block_tokens);
            if u64::from(request.prompt_tokens) + u64::from(request.output_tokens) > self.context_max.into() {
                if self.too_long == TooLong::Drop {
                    fitted.dropped += 1;
                    continue;
                }
                fitted.cut += 1;
                cut(&mut request, self.context_max, block_tokens);
            }
            requests.push(request);
        }
        let mut fit = Trace { requests, block_tokens, sharing_known: trace.sharing_known };
        fit.in_order();
        fit.requests.iter_mut().for_each(|request| request.at = request.at.div_f64(self.speed));
        (fit, fitted)
    }

    fn block_tokens(&self, before: u32) -> u32 {
        if self.scale >= 1.0 {
            return before;
        }
        let steps = (f64::from(before) * self.scale / f64::from(BLOCK_TOKENS_STEP)).round() as u32;
        (steps * BLOCK_TOKENS_STEP).clamp(BLOCK_TOKENS_STEP.min(before), before)
    }
}

/// The same number of blocks, each shortened by the same factor; no length becomes zero.
fn scaled(request: &TraceRequest, before: u32, after: u32) -> TraceRequest {
    let scale = |tokens: u32| (u64::from(tokens) * u64::from(after) / u64::from(before)).max(1) as u32;
    let whole = request.blocks.len().saturating_sub(1);
    let last = request.tokens_of_block(whole, before);
    TraceRequest {
        at: request.at,
        prompt_tokens: whole as u32 * after + scale(last),
        output_tokens: scale(request.output_tokens),
        blocks: request.blocks.clone(),
    }
}

fn cut(request: &mut TraceRequest, context_max: u32, block_tokens: u32) {
    request.output_tokens = request.output_tokens.min((context_max / 2).max(1));
    request.prompt_tokens = request.prompt_tokens.min((context_max - request.output_tokens).max(1));
    request.blocks.truncate(request.prompt_tokens.div_ceil(block_tokens) as usize);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn trace(requests: &[(u64, u32, u32, &[u64])]) -> Trace {
        let request = |&(at, prompt_tokens, output_tokens, blocks): &(u64, u32, u32, &[u64])| TraceRequest {
            at: Duration::from_millis(at),
            prompt_tokens,
            output_tokens,
            blocks: blocks.to_vec(),
        };
        Trace { requests: requests.iter().map(request).collect(), block_tokens: 512, sharing_known: true }
    }

    fn lengths(trace: &Trace) -> Vec<(u128, u32, u32, usize)> {
        trace.requests.iter().map(|r| (r.at.as_millis(), r.prompt_tokens, r.output_tokens, r.blocks.len())).collect()
    }

    #[test]
    fn nothing_asked_nothing_changed() {
        let trace = trace(&[(0, 1_300, 50, &[0, 1, 2]), (10, 512, 1, &[0])]);
        let (same, fitted) = Fit::default().apply(&trace);
        assert_eq!((same, fitted), (trace, Fitted { scale: 1.0, dropped: 0, cut: 0 }));
    }

    #[test]
    fn lengths_are_scaled_and_sharing_is_kept() {
        let trace = trace(&[(0, 1_300, 50, &[0, 1, 2]), (0, 1_024, 640, &[0, 3]), (0, 3, 1, &[4])]);
        // 512 * 0.05 is 25.6, and 32 is the nearest multiple of 16.
        let (small, fitted) = Fit { scale: 0.05, ..Fit::default() }.apply(&trace);
        assert_eq!((small.block_tokens, fitted.scale), (32, 0.0625));
        // 276 of 512 tokens in the last block become 17 of 32.
        assert_eq!(lengths(&small), [(0, 81, 3, 3), (0, 64, 40, 2), (0, 1, 1, 1)]);
        assert_eq!(small.requests[1].blocks, [0, 3]);
        let blocks = |trace: &Trace| (trace.infinite_cache().blocks, trace.infinite_cache().blocks_hit);
        assert_eq!(blocks(&small), blocks(&trace));
        let (least, fitted) = Fit { scale: 0.001, ..Fit::default() }.apply(&trace);
        assert_eq!((least.block_tokens, fitted.scale), (16, 0.03125));
    }

    #[test]
    fn requests_beyond_the_context_are_dropped_or_cut() {
        let trace = trace(&[(100, 1_300, 50, &[0, 1, 2]), (150, 900, 100, &[0, 3]), (200, 100, 2_000, &[4])]);
        let fit = Fit { context_max: 1_000, ..Fit::default() };
        let (left, fitted) = fit.apply(&trace);
        assert_eq!((lengths(&left), fitted.dropped, fitted.cut), (vec![(0, 900, 100, 2)], 2, 0));
        let (all, fitted) = Fit { too_long: TooLong::Cut, ..fit }.apply(&trace);
        assert_eq!((fitted.dropped, fitted.cut), (0, 2));
        assert_eq!(lengths(&all), [(0, 950, 50, 2), (50, 900, 100, 2), (100, 100, 500, 1)]);
    }

    #[test]
    fn a_part_starts_at_once_and_runs_at_its_speed() {
        let line = |at| (at, 10, 1, &[0][..]);
        let trace = trace(&[line(0), line(1_000), line(3_000), line(9_000)]);
        let (part, _) = Fit { from: 1, limit: 2, speed: 4.0, ..Fit::default() }.apply(&trace);
        assert_eq!(lengths(&part), [(0, 10, 1, 1), (500, 10, 1, 1)]);
    }
}
