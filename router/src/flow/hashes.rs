//! Hashes of a prompt's blocks, by which caches and the index identify them. They are computed once per request.

use baton_kv_cache::{HASH_TOKENS, PrefixHash, PrefixHasher};
use baton_node::runtime::blocking;
use baton_types::{CacheUse, Digest, ErrorKind, RequestError, Runtime, TokenId};
use std::sync::Arc;

/// A longer prompt is hashed on another thread: 0.3 µs per 16 tokens add up to two milliseconds.
const INLINE_TOKENS_MAX: usize = 100_000;

/// Hashes of the cacheable blocks of a prompt: never of the group that holds its last token, which is always computed.
/// Empty if the request shares nothing.
pub(super) async fn prompt_hashes(
    runtime: &dyn Runtime,
    cache: Option<&CacheUse>,
    model: &Digest,
    adapter: Option<Digest>,
    tokens: &Arc<[TokenId]>,
) -> Result<Arc<[PrefixHash]>, RequestError> {
    let Some(cache) = cache else { return Ok(Arc::default()) };
    let hasher = PrefixHasher::new(model, &cache.salt);
    let is_long = tokens.len() > INLINE_TOKENS_MAX;
    let tokens = tokens.clone();
    let hash = move || {
        let reusable = tokens.len().saturating_sub(1) / HASH_TOKENS * HASH_TOKENS;
        let extra: Vec<&[u8]> = adapter.iter().map(|digest| &digest.0[..]).collect();
        hasher.prompt(&tokens[..reusable], &extra).into()
    };
    if !is_long {
        return Ok(hash());
    }
    let failed = || RequestError::new(ErrorKind::Internal, "the hashes of this prompt could not be computed");
    blocking(runtime, hash).await.ok_or_else(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::runtime::TokioRuntime;

    async fn hashes(salt: Option<&[u8]>, tokens: u32) -> Arc<[PrefixHash]> {
        hashes_with(salt, None, tokens).await
    }

    async fn hashes_with(salt: Option<&[u8]>, adapter: Option<Digest>, tokens: u32) -> Arc<[PrefixHash]> {
        let cache = salt.map(|salt| CacheUse { salt: salt.into(), ttl: None, pin: None, cold: false });
        let model = Digest([1; 32]);
        prompt_hashes(&TokioRuntime::current(), cache.as_ref(), &model, adapter, &(0..tokens).collect()).await.unwrap()
    }

    #[tokio::test]
    async fn hashes_are_those_of_workers_less_that_of_the_last_token() {
        let workers = PrefixHasher::new(&Digest([1; 32]), b"a").prompt(&(0..160_000).collect::<Vec<_>>(), &[]);
        for (tokens, groups) in [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (160_000, 9_999)] {
            assert_eq!(hashes(Some(b"a"), tokens).await[..], workers[..groups], "{tokens} tokens");
        }
        assert_ne!(hashes(Some(b"b"), 33).await[..], workers[..2]);
        let adapted = PrefixHasher::new(&Digest([1; 32]), b"a").prompt(&(0..33).collect::<Vec<_>>(), &[&[7; 32]]);
        assert_eq!(hashes_with(Some(b"a"), Some(Digest([7; 32])), 33).await[..], adapted[..2]);
        assert_ne!(adapted[..2], workers[..2]);
        assert_eq!(hashes(None, 33).await.len(), 0, "what shares nothing has no hashes");
    }
}
