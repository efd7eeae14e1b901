//! Random operations on the real pool, each checked against the model: no block has two owners, is lost, or is evicted while in use.

use super::model::Model;
use super::{TTL, hashes};
use crate::{Fill, Pin, PoolGroup, PoolShape, PrefixHash, Reserve};
use baton_types::GroupKind::{self, Full, Latent, State, Window};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Operations over all shapes below.
const OPERATIONS: usize = 100_000;
/// Tokens of a block, and the groups with their blocks: from pools in which nearly everything is evicted to one in which nothing is.
const SHAPES: [(usize, &[(GroupKind, u32)]); 14] = [
    (16, &[(Full, 12)]),
    (16, &[(Full, 40)]),
    (32, &[(Full, 16), (Full, 16)]),
    (48, &[(Full, 24), (Full, 24), (Full, 24)]),
    (128, &[(Full, 24)]),
    (16, &[(Full, 24), (Window(30), 9)]),
    (16, &[(Window(17), 14), (Full, 16), (Window(40), 16)]),
    (32, &[(Latent, 20), (Window(1), 12), (Full, 18)]),
    (16, &[(Window(33), 14)]),
    (32, &[(Window(100), 30)]),
    (16, &[(Window(20), 12), (Window(50), 20)]),
    (16, &[(Full, 24), (State, 7)]),
    (32, &[(State, 16), (Latent, 20), (Window(40), 14)]),
    (16, &[(Window(33), 14), (State, 9)]),
];

/// A prompt of few symbols, so that most share a prefix with others; up to a few blocks long.
fn prompt(random: &mut StdRng, stride: usize) -> Vec<PrefixHash> {
    let len = random.random_range(1..7 * stride);
    let symbols: Vec<u8> = (0..len).map(|i| if i % stride == 0 { random.random_range(0..3) } else { 0 }).collect();
    hashes(&symbols)
}

/// Blocks of each group that a lease must get beside the cached ones.
fn fresh(shape: &PoolShape, tokens: usize, fill: Fill, found: usize) -> Vec<usize> {
    let (size, end) = (shape.block_tokens, tokens.div_ceil(shape.block_tokens));
    let of = |group: &PoolGroup| match (group.kind, fill) {
        (Window(_), Fill::Computed { chunk }) => (end - found).min(group.kind.blocks_at_once(tokens, chunk, size)),
        (State, Fill::Computed { .. }) => 2 * end.min(1),
        (State, Fill::Received { .. }) => 2 * (end - found.max(group.kind.first_for(tokens, size).min(end))),
        (Window(_), Fill::Received { .. }) => end - found.max(group.kind.first_for(tokens, size).min(end)),
        _ => end - found,
    };
    shape.groups.iter().map(of).collect()
}

fn reserve(model: &mut Model, random: &mut StdRng, stride: usize) {
    let hashes = prompt(random, stride);
    let size = 16 * stride;
    let rows = hashes.len() / stride;
    // What a peer fills is known by its hashes here, so it is whole rows of them.
    let received = rows > 0 && random.random_bool(0.3);
    let tokens = match received {
        true => rows * size,
        false => (hashes.len().div_ceil(stride) + random.random_range(0..2)) * size - random.random_range(0..size),
    };
    let reuse_tokens_max = (hashes.len() * 16 + random.random_range(0..16)).saturating_sub(1);
    let keep_free = random.random_range(0..3);
    let found = model.find(&hashes, tokens.div_ceil(size).min(reuse_tokens_max / size), received.then_some(rows));
    let chunk = random.random_range(1..3 * size);
    let peer_block_tokens = Some(size);
    let fill = if received { Fill::Received { peer_block_tokens } } else { Fill::Computed { chunk } };
    let position = if received { tokens } else { found * size };
    let wanted = fresh(&model.shape, tokens, fill, found);
    let margin = if model.pool.counts().referenced > 0 { keep_free } else { 0 };
    let fits = model.room(&hashes, found, position).fits(&wanted, margin);
    // Where it does not fit beside what is cached for it, it may fit without that.
    let position = if received { tokens } else { 0 };
    let plain = model.room(&hashes, 0, position).fits(&fresh(&model.shape, tokens, fill, 0), margin);
    let keep_free = vec![keep_free; model.shape.groups.len()];
    let reserve = Reserve { hashes: &hashes, reuse_tokens_max, tokens, fill, keep_free: &keep_free, now: model.now };
    let lease = model.pool.try_reserve(reserve);
    assert!(fits.is_none_or(|fits| lease.is_some() == (fits || plain.unwrap_or(lease.is_some()))), "{wanted:?}");
    if let Some(lease) = lease {
        let cached = lease.cached_blocks();
        assert!(cached == found || (cached == 0 && fits != Some(true)), "{cached} cached blocks, {found} were found");
        let pin = (model.is_tree && random.random_bool(0.1)).then(|| {
            let until = model.now + TTL.mul_f64(random.random_range(0.5..3.0));
            Pin { owner: random.random_range(0..2), until }
        });
        model.take(lease, hashes, pin);
        if received {
            model.complete(model.held.len() - 1, rows);
        }
    }
}

fn step(model: &mut Model, random: &mut StdRng, stride: usize) {
    let held = model.held.len();
    let index = if held > 0 { random.random_range(0..held) } else { 0 };
    match random.random_range(0..100) {
        0..25 => reserve(model, random, stride),
        25..52 if held > 0 => {
            model.advance(index, random.random_range(1..4));
            if random.random_bool(0.8) {
                model.store(index);
            }
        }
        52..55 if held > 0 => model.go_back(index, random.random_range(1..2 * 16 * stride)),
        55..61 if held > 0 => {
            // Of the computed part: the rest of an incomplete row is copied.
            let (block_tokens, complete) = (stride * 16, model.held[index].complete);
            let rest = if complete < model.held[index].lease.blocks_end() { block_tokens - 1 } else { 0 };
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
        92..95 if model.is_tree => {
            let hashes = prompt(random, stride);
            model.demote(&hashes);
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
    for (seed, (block_tokens, groups)) in SHAPES.into_iter().enumerate() {
        let mut random = StdRng::seed_from_u64(seed as u64);
        let groups = groups.iter().map(|(kind, blocks)| PoolGroup { kind: *kind, blocks: *blocks }).collect();
        let mut model = Model::new(PoolShape { block_tokens, groups });
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
