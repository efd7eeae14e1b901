//! Random operations on the real pool, each checked against the model: no block has two owners, is lost, or is evicted while in use.

use super::model::Model;
use super::{TTL, hashes};
use crate::{Pin, PrefixHash, Reserve};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Operations over all shapes below.
const OPERATIONS: usize = 100_000;
/// Groups, blocks of each, tokens of a block: from pools in which nearly everything is evicted to one in which nothing is.
const SHAPES: [(usize, u32, usize); 5] = [(1, 12, 16), (1, 40, 16), (2, 16, 32), (3, 24, 48), (1, 24, 128)];

/// A prompt of few symbols, so that most share a prefix with others; up to a few blocks long.
fn prompt(random: &mut StdRng, stride: usize) -> Vec<PrefixHash> {
    let len = random.random_range(1..7 * stride);
    let symbols: Vec<u8> = (0..len).map(|i| if i % stride == 0 { random.random_range(0..3) } else { 0 }).collect();
    hashes(&symbols)
}

fn reserve(model: &mut Model, random: &mut StdRng, stride: usize) {
    let hashes = prompt(random, stride);
    let blocks = hashes.len().div_ceil(stride) + random.random_range(0..2);
    let reuse_tokens_max = (hashes.len() * 16 + random.random_range(0..16)).saturating_sub(1);
    let keep_free = random.random_range(0..3);
    let found = model.find(&hashes, blocks.min(reuse_tokens_max / (16 * stride)));
    let margin = if model.pool.counts().referenced > 0 { keep_free } else { 0 };
    let fits = model.room(&hashes, found) >= blocks - found + margin;
    let lease =
        model.pool.try_reserve(Reserve { hashes: &hashes, reuse_tokens_max, blocks, keep_free, now: model.now });
    assert_eq!(lease.is_some(), fits);
    if let Some(lease) = lease {
        assert_eq!((lease.cached_blocks(), lease.blocks_min()), (found, blocks));
        let pin = random.random_bool(0.1).then(|| {
            let until = model.now + TTL.mul_f64(random.random_range(0.5..3.0));
            Pin { owner: random.random_range(0..2), until }
        });
        model.take(lease, hashes, pin);
    }
}

fn step(model: &mut Model, random: &mut StdRng, stride: usize) {
    let held = model.held.len();
    let index = if held > 0 { random.random_range(0..held) } else { 0 };
    match random.random_range(0..100) {
        0..25 => reserve(model, random, stride),
        25..50 if held > 0 => {
            model.complete(index, random.random_range(0..8));
            if random.random_bool(0.8) {
                model.store(index);
            }
        }
        50..55 if held > 0 => model.grow(index, random.random_range(1..3)),
        55..61 if held > 0 => {
            // Of the computed part: the rest of an incomplete row is copied.
            let (block_tokens, complete) = (stride * 16, model.held[index].complete);
            let rest = if complete < model.held[index].lease.blocks_min() { block_tokens - 1 } else { 0 };
            let tokens = random.random_range(0..=complete) * block_tokens;
            model.fork(index, tokens + random.random_range(0..=rest));
        }
        61..81 if held > 0 => model.drop_lease(index),
        81..85 if held > 0 => model.let_go_of_spares(index),
        85..89 if held > 0 && model.may_be_quarantined(index) => model.quarantine(index),
        89..92 => {
            if let Some(quarantined) = model.quarantined.pop() {
                quarantined.release();
            }
        }
        92..95 => {
            let hashes = prompt(random, stride);
            model.chill(&hashes);
        }
        95..98 => {
            model.now += TTL.mul_f64(random.random_range(0.0..0.7));
            model.expire();
        }
        _ => {}
    }
}

#[test]
fn random_operations_agree_with_the_model() {
    let mut counts = crate::CacheCounts::default();
    for (seed, (groups, blocks, block_tokens)) in SHAPES.into_iter().enumerate() {
        let mut random = StdRng::seed_from_u64(seed as u64);
        let mut model = Model::new(groups, blocks, block_tokens);
        for _ in 0..OPERATIONS / SHAPES.len() {
            step(&mut model, &mut random, block_tokens / 16);
            model.check();
        }
        let of_this = model.pool.cache_counts();
        counts.stored += of_this.stored;
        counts.evicted += of_this.evicted;
        counts.expired += of_this.expired;
        counts.unpinned += of_this.unpinned;
        model.held.clear();
        model.quarantined.drain(..).for_each(|quarantined| quarantined.release());
        assert_eq!(model.pool.counts().referenced + model.pool.counts().quarantined, 0);
    }
    // A test in which an event never happens did not test it.
    assert!(
        counts.stored > 1000 && counts.evicted > 1000 && counts.expired > 100 && counts.unpinned > 100,
        "{counts:?}"
    );
}
