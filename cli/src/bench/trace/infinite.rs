//! The hits of a cache that all workers share and that never evicts: no placement and no cache size can do better.

use super::Trace;
use std::collections::HashMap;

/// Hits of an infinite global cache, with prompts in order of arrival. The leading blocks of a prompt that were all in earlier prompts
/// are hits.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct InfiniteCache {
    /// Blocks of all prompts.
    pub(crate) blocks: u64,
    /// How many of `blocks` are hits.
    pub(crate) blocks_hit: u64,
    /// Distinct blocks: the size at which a cache is infinite for this trace.
    pub(crate) blocks_unique: u64,
    /// Tokens of all prompts.
    pub(crate) tokens: u64,
    /// How many of `tokens` are hits. A prompt's last token never is: the first token of the answer is computed from it.
    pub(crate) tokens_hit: u64,
    /// `tokens_hit` of each request.
    pub(crate) tokens_hit_by_request: Vec<u32>,
}

impl InfiniteCache {
    /// Hit share of the blocks, 0 to 1.
    pub(crate) fn block_rate(&self) -> f64 {
        self.blocks_hit as f64 / self.blocks.max(1) as f64
    }

    /// Hit share of the tokens, 0 to 1.
    pub(crate) fn token_rate(&self) -> f64 {
        self.tokens_hit as f64 / self.tokens.max(1) as f64
    }
}

impl Trace {
    /// The hits of an infinite global cache.
    pub(crate) fn infinite_cache(&self) -> InfiniteCache {
        let mut total = InfiniteCache::default();
        // A block is identified by its predecessors: maps the parent's number and the block's id to its number and the most tokens seen
        // of it.
        let mut seen: HashMap<(u64, u64), (u64, u32)> = HashMap::new();
        for request in &self.requests {
            let (mut parent, mut hits, mut tokens_hit) = (0, true, 0);
            for (index, &id) in request.blocks.iter().enumerate() {
                let tokens = request.tokens_of_block(index, self.block_tokens);
                let fresh = seen.len() as u64 + 1;
                let (block, most) = seen.entry((parent, id)).or_insert((fresh, 0));
                hits &= *block != fresh;
                if hits {
                    total.blocks_hit += 1;
                    tokens_hit += tokens.min(*most);
                    // After a block that was truncated before, the same ids stand for different tokens.
                    hits = *most >= tokens;
                }
                *most = tokens.max(*most);
                parent = *block;
            }
            let tokens_hit = tokens_hit.min(request.prompt_tokens.saturating_sub(1));
            total.blocks += request.blocks.len() as u64;
            total.tokens += u64::from(request.prompt_tokens);
            total.tokens_hit += u64::from(tokens_hit);
            total.tokens_hit_by_request.push(tokens_hit);
        }
        total.blocks_unique = seen.len() as u64;
        total
    }
}

#[cfg(test)]
mod tests {
    use super::super::TraceRequest;
    use super::*;
    use std::time::Duration;

    fn of(requests: &[(u32, &[u64])]) -> InfiniteCache {
        let request = |&(prompt_tokens, blocks): &(u32, &[u64])| TraceRequest {
            at: Duration::ZERO,
            prompt_tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
        };
        let requests = requests.iter().map(request).collect();
        Trace { requests, block_tokens: 512, sharing_known: true }.infinite_cache()
    }

    #[test]
    fn the_first_blocks_hit_as_far_as_they_were_seen() {
        let infinite = of(&[(1_100, &[0, 1, 2]), (1_100, &[0, 1, 3]), (1_100, &[4, 1, 2])]);
        assert_eq!(infinite.tokens_hit_by_request, [0, 1_024, 0]);
        assert_eq!((infinite.blocks, infinite.blocks_hit, infinite.blocks_unique), (9, 2, 7));
        assert_eq!((infinite.tokens, infinite.tokens_hit), (3_300, 1_024));
        assert!((infinite.block_rate() - 2.0 / 9.0).abs() < 1e-12);
        assert!((infinite.token_rate() - 1_024.0 / 3_300.0).abs() < 1e-12);
    }

    #[test]
    fn the_last_token_is_computed_even_of_a_prompt_that_was_seen() {
        let infinite = of(&[(600, &[0, 1]), (600, &[0, 1])]);
        assert_eq!((infinite.blocks_hit, infinite.tokens_hit), (2, 599));
    }

    #[test]
    fn a_block_that_was_cut_hits_as_far_as_it_was_there() {
        let infinite = of(&[(600, &[0, 1]), (1_024, &[0, 1]), (1_100, &[0, 1, 2])]);
        assert_eq!(infinite.tokens_hit_by_request, [0, 600, 1_024]);
    }

    #[test]
    fn nothing_hits_nothing() {
        assert_eq!((of(&[]).block_rate(), of(&[]).token_rate()), (0.0, 0.0));
    }
}
