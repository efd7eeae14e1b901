//! Identical requests, for a first test of a cluster.

use crate::bench::trace::{Trace, TraceRequest};
use std::time::Duration;

/// Any number of requests of one shape.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Synthetic {
    pub(crate) requests: u32,
    /// Tokens of each prompt, at least 1.
    pub(crate) prompt_tokens: u32,
    /// Tokens of each answer, at least 1.
    pub(crate) output_tokens: u32,
    /// Tokens of the prefix that all prompts share; at most the whole prompt.
    pub(crate) shared_prefix_tokens: u32,
}

impl Synthetic {
    /// The requests as a trace in which all arrive at once. Its blocks are as long as the shared prefix.
    pub(crate) fn trace(self) -> Trace {
        let shared = u64::from(self.shared_prefix_tokens > 0);
        let block_tokens = if shared > 0 { self.shared_prefix_tokens } else { self.prompt_tokens };
        let own = u64::from(self.prompt_tokens.div_ceil(block_tokens)) - shared;
        let request = |number: u64| TraceRequest {
            at: Duration::ZERO,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            blocks: (0..shared).chain(shared + number * own..shared + (number + 1) * own).collect(),
        };
        Trace { requests: (0..u64::from(self.requests)).map(request).collect(), block_tokens, sharing_known: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(requests: u32, prompt_tokens: u32, shared_prefix_tokens: u32) -> Vec<u32> {
        let synthetic = Synthetic { requests, prompt_tokens, output_tokens: 8, shared_prefix_tokens };
        let trace = synthetic.trace();
        assert!(trace.requests.iter().all(|r| r.prompt_tokens == prompt_tokens && r.output_tokens == 8));
        let blocks = |r: &TraceRequest| r.blocks.len() == prompt_tokens.div_ceil(trace.block_tokens) as usize;
        assert!(trace.requests.iter().all(blocks));
        trace.infinite_cache().tokens_hit_by_request
    }

    #[test]
    fn all_prompts_share_what_was_asked_and_no_more() {
        assert_eq!(hits(3, 100, 30), [0, 30, 30]);
        assert_eq!(hits(3, 100, 1), [0, 1, 1]);
        assert_eq!(hits(3, 100, 0), [0, 0, 0]);
        assert_eq!(hits(2, 100, 100), [0, 99], "the last token is computed");
    }
}
