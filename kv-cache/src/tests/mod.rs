//! Tests of the public API of pool and cache: short cases, and random operations compared with a model.

mod cases;
mod follow;
mod model;
mod random;
mod states;
mod windows;

use crate::{CacheConfig, PoolShape, PrefixHash, PrefixHasher, SharedPool};
use baton_types::{Digest, TokenId};
use std::time::Duration;

const TTL: Duration = Duration::from_secs(300);

fn pool(groups: usize, blocks: u32, block_tokens: usize) -> SharedPool {
    pool_of(PoolShape::full(groups, blocks, block_tokens))
}

fn pool_of(shape: PoolShape) -> SharedPool {
    let config = CacheConfig { pinned_max: 6, pinned_of_one_max: 4, changes_max: 1 << 20 };
    SharedPool::with_cache(shape, config).unwrap()
}

/// Hashes of a prompt, given as one symbol per 16 tokens.
fn hashes(symbols: &[u8]) -> Vec<PrefixHash> {
    let tokens: Vec<TokenId> = symbols.iter().flat_map(|s| [TokenId::from(*s); 16]).collect();
    PrefixHasher::new(&Digest([7; 32]), b"tenant").prompt(&tokens, &[])
}
