//! Names of a trace's blocks.

use crate::bench::trace::Trace;
use baton_kv_cache::{HASH_TOKENS, PrefixHash, PrefixHasher};
use baton_types::{Digest, TokenId};

/// The names of each prompt's whole blocks. The last block has none where it is cut: what a cache holds is whole.
pub(super) struct Names(Vec<Vec<PrefixHash>>);

impl Names {
    /// Chained by the hasher that names prompts in earnest, over tokens that spell the blocks' ids.
    pub(super) fn of_trace(trace: &Trace) -> Self {
        let hasher = PrefixHasher::new(&Digest([0; 32]), &[]);
        let named = trace.requests.iter().map(|request| {
            let whole = (request.prompt_tokens / trace.block_tokens) as usize;
            let mut parent = hasher.root();
            let chain = request.blocks.iter().take(whole).map(|id| {
                let mut tokens = [0; HASH_TOKENS];
                (tokens[0], tokens[1]) = ((id >> 32) as TokenId, *id as TokenId);
                parent = hasher.next(parent, &tokens, &[]);
                parent
            });
            chain.collect()
        });
        Self(named.collect())
    }

    /// Those of a request.
    pub(super) fn of(&self, request: usize) -> &[PrefixHash] {
        &self.0[request]
    }
}
