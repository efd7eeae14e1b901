//! Groups with a window beside full ones, and alone. Blocks have 16 tokens: each symbol of a prompt is a block.

use super::{TTL, hashes, pool_of};
use crate::{Fill, Keep, Lease, Pin, PoolGroup, PoolShape, Reserve, SharedPool, StateBefore};
use baton_types::GroupKind::{self, Full, State, Window};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub(super) fn pool(groups: &[(GroupKind, u32)]) -> SharedPool {
    let groups = groups.iter().map(|(kind, blocks)| PoolGroup { kind: *kind, blocks: *blocks });
    pool_of(PoolShape { block_tokens: 16, groups: groups.collect() })
}

pub(super) fn reserve(pool: &SharedPool, symbols: &[u8], fill: Fill) -> Option<Lease> {
    let (hashes, tokens) = (hashes(symbols), symbols.len() * 16);
    let wanted =
        Reserve { hashes: &hashes, reuse_tokens_max: tokens, tokens, fill, keep_free: &[], now: Instant::now() };
    pool.try_reserve(wanted)
}

/// Computes and caches a prompt, block by block, and drops its lease.
fn cache(pool: &SharedPool, symbols: &[u8]) {
    let mut lease = reserve(pool, symbols, Fill::Computed { chunk: 16 }).unwrap();
    for block in lease.cached_blocks()..symbols.len() {
        assert!(lease.hold(block * 16..(block + 1) * 16, StateBefore::Replaced));
        lease.store(&hashes(symbols), (block + 1) * 16, Keep::idle(TTL), Instant::now());
    }
}

pub(super) fn cached(pool: &SharedPool, symbols: &[u8]) -> usize {
    pool.cached_tokens(&hashes(symbols)) / 16
}

/// Indices of the blocks of each group.
pub(super) fn held(lease: &Lease) -> Vec<(usize, usize)> {
    lease.tables().0.iter().map(|table| (table.first, table.end())).collect()
}

#[test]
fn a_sequence_holds_its_window_and_no_more() {
    let pool = pool(&[(Full, 16), (Window(32), 4)]);
    let mut lease = reserve(&pool, b"abcdefghij", Fill::Computed { chunk: 16 }).unwrap();
    // A chunk and the 31 tokens before it touch four blocks at most.
    assert_eq!(held(&lease), [(0, 10), (0, 4)]);
    for block in 0..10 {
        assert!(
            lease.hold(block * 16..(block + 1) * 16, StateBefore::Replaced),
            "it exchanges blocks, though the group has no others"
        );
    }
    assert_eq!(held(&lease), [(0, 10), (7, 10)]);
    assert_eq!((pool.counts_of(1).free, pool.available()), (1, vec![6, 1]));
    assert!(lease.hold(160..161, StateBefore::Replaced));
    assert_eq!(held(&lease), [(0, 11), (8, 11)]);
}

#[test]
fn what_a_peer_fills_is_what_the_next_position_needs() {
    let pool = pool(&[(Full, 16), (Window(40), 8), (State, 3)]);
    let lease = reserve(&pool, b"abcdefghij", Fill::Received { peer_block_tokens: None }).unwrap();
    // Position 160 attends to 121 and later.
    assert_eq!(held(&lease), [(0, 10), (7, 10), (9, 10)]);
    assert_eq!((pool.shape().blocks_received(160), pool.counts_of(2).free), (vec![10, 3, 2], 1));
    assert_eq!((lease.blocks_end(), lease.missing(160..192, StateBefore::Replaced)), (10, vec![2, 2, 0]));
}

/// Position 160 attends to 121 and later. A peer with blocks of 48 begins with 96, one with blocks of 16 with 112.
#[test]
fn what_a_peer_fills_in_part_is_not_cached() {
    for (peer_block_tokens, whole) in [(Some(16), true), (Some(48), true), (Some(32), true), (None, false)] {
        let pool = pool(&[(Full, 16), (Window(40), 8)]);
        let mut lease = reserve(&pool, b"abcdefghij", Fill::Received { peer_block_tokens }).unwrap();
        lease.store(&hashes(b"abcdefghij"), 160, Keep::idle(TTL), Instant::now());
        assert_eq!(cached(&pool, b"abcdefghij"), if whole { 10 } else { 0 }, "{peer_block_tokens:?}");
    }
    // Here the block of 48 begins with 96, and the peer's first one of 16 with 112.
    let groups = [(Full, 16), (Window(40), 8)].map(|(kind, blocks)| PoolGroup { kind, blocks });
    let pool = pool_of(PoolShape { block_tokens: 48, groups: groups.to_vec() });
    let symbols = [7; 12];
    let hashes = hashes(&symbols);
    let fill = Fill::Received { peer_block_tokens: Some(16) };
    let wanted =
        Reserve { hashes: &hashes, reuse_tokens_max: 0, tokens: 160, fill, keep_free: &[], now: Instant::now() };
    let mut lease = pool.try_reserve(wanted).unwrap();
    lease.store(&hashes, 160, Keep::idle(TTL), Instant::now());
    assert_eq!((pool.cache_counts().blocks, pool.cached_tokens(&hashes)), (3, 0));
}

#[test]
fn a_hit_ends_where_every_window_before_it_is_cached() {
    let pool = pool(&[(Full, 16), (Window(32), 8)]);
    cache(&pool, b"abcdef");
    assert_eq!((cached(&pool, b"abcdef"), cached(&pool, b"abcx")), (6, 3), "returned blocks stay cached");
    let hit = reserve(&pool, b"abcdefg", Fill::Computed { chunk: 16 }).unwrap();
    // Position 96 attends to 65 and later: blocks 4 and 5 are shared.
    assert_eq!((hit.cached_blocks(), held(&hit)), (6, vec![(0, 7), (4, 7)]));
    drop(hit);
    // Six of eight window blocks are cached. Five are needed: the oldest three go, those of a, b and c.
    let taken = pool.try_lease(&[0, 5]).unwrap();
    assert_eq!(pool.cache_counts().blocks, 6, "their full blocks stay");
    assert_eq!([&b"abcdef"[..], b"abcde", b"abcd", b"abc"].map(|symbols| cached(&pool, symbols)), [6, 5, 0, 0]);
    drop(taken);
    // A sequence that computes them again gives them back to the entries.
    cache(&pool, b"abcd");
    assert_eq!(cached(&pool, b"abcd"), 4);
}

#[test]
fn an_entry_that_no_hit_can_end_with_goes_whole() {
    let pool = pool(&[(Full, 16), (Window(32), 4)]);
    cache(&pool, b"ab");
    drop(pool.try_lease(&[0, 3]).unwrap());
    // The end lost its window block, and went; then a is the end, and a hit.
    assert_eq!((cached(&pool, b"ab"), pool.cache_counts().blocks, pool.counts_of(0).cached), (1, 1, 1));
    drop(pool.try_lease(&[0, 4]).unwrap());
    assert_eq!((pool.cache_counts().blocks, pool.counts().free), (0, 20));
}

#[test]
fn full_blocks_take_the_window_blocks_of_their_entries_with_them() {
    let pool = pool(&[(Full, 4), (Window(64), 8)]);
    cache(&pool, b"abc");
    drop(pool.try_lease(&[3, 0]).unwrap());
    assert_eq!((cached(&pool, b"abc"), pool.counts_of(1).free), (1, 7));
}

#[test]
fn a_window_alone_needs_nothing_before_it() {
    let pool = pool(&[(Window(32), 6)]);
    cache(&pool, b"abcdefgh");
    assert_eq!((cached(&pool, b"abcdefgh"), pool.cache_counts().blocks), (8, 6), "the first two made room");
    assert_eq!([&b"abcde"[..], b"abc"].map(|symbols| cached(&pool, symbols)), [5, 0]);
    let hit = reserve(&pool, b"abcdefghi", Fill::Computed { chunk: 16 }).unwrap();
    assert_eq!((hit.cached_blocks(), held(&hit)), (8, vec![(6, 9)]));
}

#[test]
fn a_fork_needs_what_its_position_attends_to() {
    let pool = pool(&[(Full, 16), (Window(32), 8)]);
    let mut lease = reserve(&pool, b"abcd", Fill::Computed { chunk: 16 }).unwrap();
    (0..4).for_each(|block| assert!(lease.hold(block * 16..(block + 1) * 16, StateBefore::Replaced)));
    let (fork, copy) = lease.fork(56, 64, &[]).unwrap();
    assert_eq!((held(&fork), copy.unwrap().from.total()), (vec![(0, 4), (1, 4)], 2));
    assert!(lease.hold(80..81, StateBefore::Replaced));
    assert_eq!((held(&lease), lease.fork(56, 64, &[]).is_none()), (vec![(0, 6), (3, 6)], true));
    assert!(lease.fork(80, 81, &[]).is_some());
}

#[test]
fn a_fork_knows_what_a_peer_filled_in_part() {
    let pool = pool(&[(Full, 16), (Window(40), 8)]);
    let lease = reserve(&pool, b"abcdefghij", Fill::Received { peer_block_tokens: None }).unwrap();
    let (mut fork, _) = lease.fork(159, 160, &[]).unwrap();
    assert_eq!(held(&fork), [(0, 10), (7, 10)]);
    fork.store(&hashes(b"abcdefghij"), 160, Keep::idle(TTL), Instant::now());
    // Position 160 attends to 121 and later: to the block that begins with 112.
    assert_eq!(cached(&pool, b"abcdefghij"), 0);
}

/// Cached and fresh blocks of a window may be more than a sequence needs at once. Then it computes its prompt again, instead of waiting for
/// blocks that nobody holds.
#[test]
fn a_hit_that_does_not_fit_beside_fresh_blocks_is_left_out() {
    // A window of 32 and a chunk of 32 tokens touch five blocks at most.
    let pool = pool(&[(Window(32), 6)]);
    cache(&pool, b"abcdefgh");
    assert_eq!(cached(&pool, b"abcdefghijklmn"), 8);
    let lease = reserve(&pool, b"abcdefghijklmn", Fill::Computed { chunk: 32 }).expect("the pool is not in use");
    assert_eq!((lease.cached_blocks(), held(&lease)), (0, vec![(0, 5)]));
}

/// A peer that fills a long prompt holds full blocks of its cached prefix, and none of the window's before its end.
#[test]
fn pins_end_on_window_blocks_whose_entry_is_in_use() {
    let pool = pool(&[(Full, 16), (Window(32), 8)]);
    let pin = Pin { owner: 1, until: Instant::now() + 10 * TTL };
    let mut lease = reserve(&pool, b"ab", Fill::Computed { chunk: 16 }).unwrap();
    lease.store(&hashes(b"ab"), 32, Keep { ttl: TTL, pin: Some(pin) }, Instant::now());
    drop(lease);
    let received = reserve(&pool, b"abcdef", Fill::Received { peer_block_tokens: None }).unwrap();
    assert_eq!((held(&received), pool.available()), (vec![(0, 6), (4, 6)], vec![10, 4]));
    let told = Arc::new(AtomicUsize::new(0));
    let seen = told.clone();
    pool.on_freed(move || _ = seen.fetch_add(1, Ordering::Relaxed));
    assert!(pool.waive_pins(), "two window blocks are idle");
    assert_eq!((pool.available(), pool.waive_pins()), (vec![10, 6], false));
    assert_eq!(told.load(Ordering::Relaxed), 1, "who waits for room hears of it, and not of nothing");
    drop(received);
    assert_eq!(pool.cache_counts().pinned, 2, "its full blocks were in use");
}
