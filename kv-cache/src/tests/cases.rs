//! Short cases of the cache's behaviour. Blocks have 16 tokens unless stated otherwise: each symbol of a prompt is a block.

use super::{TTL, hashes, pool};
use crate::{BlockCounts, Change, Fill, Keep, Lease, Pin, PrefixHash, Reserve, SharedPool};
use std::time::{Duration, Instant};

fn reserve(pool: &SharedPool, hashes: &[PrefixHash], blocks: usize, now: Instant) -> Option<Lease> {
    let (tokens, fill) = (blocks * pool.shape().block_tokens, Fill::Computed { chunk: 16 });
    pool.try_reserve(Reserve { hashes, reuse_tokens_max: tokens, tokens, fill, keep_free: &[], now })
}

/// Computes and caches a prompt of whole blocks, and drops its lease.
fn cache(pool: &SharedPool, symbols: &[u8], now: Instant) {
    let hashes = hashes(symbols);
    let mut lease = reserve(pool, &hashes, symbols.len(), now).unwrap();
    lease.store(&hashes, symbols.len() * 16, Keep::idle(TTL), now);
}

fn cached(pool: &SharedPool, symbols: &[u8]) -> usize {
    pool.cached_tokens(&hashes(symbols)) / 16
}

#[test]
fn what_was_stored_is_found_and_shared() {
    let (pool, now) = (pool(2, 8, 16), Instant::now());
    cache(&pool, b"abcd", now);
    assert_eq!(pool.counts(), BlockCounts { total: 16, free: 8, cached: 8, ..BlockCounts::default() });
    let one = reserve(&pool, &hashes(b"abcx"), 4, now).unwrap();
    let two = reserve(&pool, &hashes(b"abyz"), 4, now).unwrap();
    assert_eq!((one.cached_blocks(), two.cached_blocks()), (3, 2));
    for group in 0..2 {
        assert_eq!(one.blocks().0[group][..2], two.blocks().0[group][..2]);
        assert!(!two.blocks().0[group].contains(&one.blocks().0[group][3]));
    }
    // a, b, c, and one and two unshared blocks; d is idle.
    assert_eq!(pool.counts(), BlockCounts { total: 16, free: 2, referenced: 12, cached: 2, ..BlockCounts::default() });
    drop((one, two));
    assert_eq!((cached(&pool, b"abcd"), pool.counts().free), (4, 8));
}

#[test]
fn the_last_token_is_always_computed() {
    let (pool, now) = (pool(1, 8, 16), Instant::now());
    cache(&pool, b"ab", now);
    let hashes = hashes(b"ab");
    let fill = Fill::Computed { chunk: 16 };
    let wanted = Reserve { hashes: &hashes, reuse_tokens_max: 31, tokens: 32, fill, keep_free: &[], now };
    let again = pool.try_reserve(wanted);
    assert_eq!(again.unwrap().cached_blocks(), 1);
}

#[test]
fn larger_blocks_are_found_whole_or_not_at_all() {
    let (pool, now) = (pool(1, 8, 64), Instant::now());
    let stored = hashes(b"abcdefghijk");
    let mut lease = reserve(&pool, &stored, 3, now).unwrap();
    lease.store(&stored, 11 * 16, Keep::idle(TTL), now);
    drop(lease);
    assert_eq!([&b"abcdefghi"[..], b"abcdefgx", b"abcd", b"abc"].map(|p| cached(&pool, p)), [8, 4, 4, 0]);
}

#[test]
fn the_same_prefix_computed_twice_is_kept_once() {
    let (pool, now) = (pool(1, 8, 16), Instant::now());
    let prompt = hashes(b"abc");
    let mut leases = [reserve(&pool, &prompt, 3, now).unwrap(), reserve(&pool, &prompt, 3, now).unwrap()];
    leases.iter_mut().for_each(|lease| lease.store(&prompt, 48, Keep::idle(TTL), now));
    assert_eq!(leases[0].blocks(), leases[1].blocks());
    assert_eq!(pool.counts().referenced, 6, "what the second one computed may still be read");
    leases[1].let_go_of_spares();
    assert_eq!((pool.counts().referenced, pool.counts().free), (3, 5));
    drop(leases);
    assert_eq!((pool.counts().cached, pool.counts().free), (3, 5));
}

#[test]
fn room_is_made_of_what_was_idle_longest_leaves_first() {
    let (pool, now) = (pool(1, 6, 16), Instant::now());
    cache(&pool, b"abc", now);
    cache(&pool, b"xy", now);
    cache(&pool, b"ab", now); // Used again: a and b outlive x and y.
    let mut held = vec![];
    for expected in [(3, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)] {
        held.extend(pool.try_lease(&[1]));
        // The first one was free.
        assert_eq!((cached(&pool, b"abc"), cached(&pool, b"xy")), expected);
    }
    assert!(pool.try_lease(&[1]).is_none());
}

#[test]
fn nothing_that_is_used_makes_room() {
    let (pool, now) = (pool(1, 4, 16), Instant::now());
    cache(&pool, b"abc", now);
    let user = reserve(&pool, &hashes(b"ab"), 2, now).unwrap();
    assert_eq!(pool.free_min(), 2);
    assert!(pool.try_lease(&[3]).is_none());
    assert_eq!(cached(&pool, b"abc"), 3, "a refused lease costs nobody anything");
    let rest = pool.try_lease(&[2]).unwrap();
    assert_eq!((cached(&pool, b"abc"), user.cached_blocks()), (2, 2));
    drop((user, rest));
    // Blocks that a reservation finds cached are not available for its rest.
    assert!(reserve(&pool, &hashes(b"abcde"), 5, now).is_none());
    assert_eq!(cached(&pool, b"ab"), 2);
}

#[test]
fn time_without_use_ends_it_and_use_begins_it_again() {
    let (pool, start) = (pool(1, 8, 16), Instant::now());
    cache(&pool, b"abc", start);
    let later = start + TTL / 2;
    cache(&pool, b"ab", later);
    pool.expire(start + TTL);
    assert_eq!(cached(&pool, b"abc"), 2);
    let long = reserve(&pool, &hashes(b"ab"), 2, start + TTL).unwrap();
    pool.expire(start + 10 * TTL);
    drop(long);
    pool.expire(start + 11 * TTL - Duration::from_secs(1));
    assert_eq!(cached(&pool, b"ab"), 2, "it was in use until a moment ago");
    pool.expire(start + 11 * TTL);
    assert_eq!((cached(&pool, b"ab"), pool.counts().free), (0, 8));
}

#[test]
fn of_two_times_to_live_the_longer_counts() {
    for times in [[3 * TTL, TTL], [TTL, 3 * TTL]] {
        let (pool, now) = (pool(1, 8, 16), Instant::now());
        for ttl in times {
            let mut lease = reserve(&pool, &hashes(b"ab"), 2, now).unwrap();
            lease.store(&hashes(b"ab"), 32, Keep::idle(ttl), now);
        }
        pool.expire(now + 3 * TTL - Duration::from_secs(1));
        assert_eq!(cached(&pool, b"ab"), 2, "{times:?}");
        pool.expire(now + 3 * TTL);
        assert_eq!((cached(&pool, b"ab"), pool.counts().free), (0, 8), "{times:?}");
    }
}

/// The queue of idle blocks is not in order of expiry.
#[test]
fn each_block_expires_at_its_own_time_whatever_is_before_it_in_the_queue() {
    let (pool, now) = (pool(1, 16, 16), Instant::now());
    for (symbols, ttl) in [(b"ab", 4 * TTL), (b"cd", TTL), (b"ef", 3 * TTL), (b"gh", 2 * TTL)] {
        let mut lease = reserve(&pool, &hashes(symbols), 2, now).unwrap();
        lease.store(&hashes(symbols), 32, Keep::idle(ttl), now);
    }
    pool.demote(&hashes(b"ef"));
    let left = || [b"ab", b"cd", b"ef", b"gh"].map(|symbols| cached(&pool, symbols));
    for (times, expected) in [(0, [2, 2, 2, 2]), (1, [2, 0, 2, 2]), (2, [2, 0, 2, 0]), (3, [2, 0, 0, 0]), (4, [0; 4])] {
        pool.expire(now + times * TTL);
        assert_eq!(left(), expected, "after {times}");
    }
    assert_eq!((pool.counts().free, pool.cache_counts().expired), (16, 8));
}

#[test]
fn pins_outlive_room_and_time_within_their_quota() {
    let (pool, now) = (pool(1, 8, 16), Instant::now());
    let (prompt, until) = (hashes(b"abcdef"), now + 10 * TTL);
    let mut lease = reserve(&pool, &prompt, 6, now).unwrap();
    lease.store(&prompt, 96, Keep { ttl: TTL, pin: Some(Pin { owner: 1, until }) }, now);
    drop(lease);
    assert_eq!((pool.cache_counts().pinned, pool.cache_counts().unpinned), (4, 2), "the first ones are pinned");
    assert_eq!(pool.free_min(), 4);
    drop(pool.try_lease(&[4]).unwrap());
    pool.expire(until - Duration::from_secs(1));
    assert_eq!((cached(&pool, b"abcdef"), pool.try_lease(&[5]).is_none()), (4, true));
    pool.expire(until);
    assert_eq!((pool.cache_counts().pinned, pool.free_min()), (0, 8));
    drop(pool.try_lease(&[5]).unwrap());
    assert_eq!(cached(&pool, b"abcdef"), 3, "leaves first");
}

/// Caches a prompt of whole, unshared blocks, pinned for `owner` until then; returns how many of its blocks the quotas allowed.
fn pin(pool: &SharedPool, symbols: &[u8], owner: u64, until: Instant, now: Instant) -> usize {
    let (hashes, before) = (hashes(symbols), pool.cache_counts().pinned);
    let mut lease = reserve(pool, &hashes, symbols.len(), now).unwrap();
    lease.store(&hashes, symbols.len() * 16, Keep { ttl: 20 * TTL, pin: Some(Pin { owner, until }) }, now);
    pool.cache_counts().pinned - before
}

#[test]
fn pins_of_all_have_a_quota_too() {
    let (pool, now) = (pool(1, 16, 16), Instant::now());
    let until = now + 10 * TTL;
    let taken = [(b"abcde", 1), (b"fghij", 2), (b"klmno", 3)].map(|(s, owner)| pin(&pool, s, owner, until, now));
    assert_eq!(taken, [4, 2, 0], "4 of one, 6 of all");
}

#[test]
fn a_pin_that_ends_gives_back_its_own_place_alone() {
    let (pool, now) = (pool(1, 16, 16), Instant::now());
    let (soon, late) = (now + TTL, now + 10 * TTL);
    assert_eq!((pin(&pool, b"ab", 1, soon, now), pin(&pool, b"cd", 1, late, now)), (2, 2));
    pool.expire(soon);
    assert_eq!(pin(&pool, b"efgh", 1, late, soon), 2, "two of four still stand");
}

#[test]
fn what_is_cold_goes_first_up_to_where_others_join() {
    let (pool, now) = (pool(1, 6, 16), Instant::now());
    cache(&pool, b"abc", now);
    cache(&pool, b"abxy", now);
    pool.demote(&hashes(b"abxy"));
    drop(pool.try_lease(&[2]).unwrap());
    assert_eq!((cached(&pool, b"abxy"), cached(&pool, b"abc")), (3, 3));
    drop(pool.try_lease(&[3]).unwrap());
    assert_eq!((cached(&pool, b"abxy"), cached(&pool, b"abc")), (2, 3));
}

#[test]
fn a_fork_shares_whole_blocks_and_copies_the_one_that_both_write() {
    let (pool, now) = (pool(1, 6, 16), Instant::now());
    let lease = reserve(&pool, &[], 3, now).unwrap();
    let (fork, copy) = lease.fork(40, 48, &[]).unwrap();
    let copy = copy.unwrap();
    assert_eq!((copy.tokens, &copy.from.0[0]), (8, &vec![lease.blocks().0[0][2]]));
    assert_eq!(fork.blocks().0[0], [&lease.blocks().0[0][..2], &copy.to.0[0]].concat());
    assert_eq!(pool.counts().referenced, 4);
    drop(lease);
    assert_eq!(pool.counts().referenced, 3, "the fork keeps what it shares");
    let (even, copy) = fork.fork(32, 32, &[]).unwrap();
    assert_eq!((even.blocks_end(), copy), (2, None));
    drop((fork, even));
    assert_eq!(pool.counts().free, 6);
}

#[test]
fn a_quarantine_takes_only_what_a_peer_was_given_to_write() {
    let (pool, now) = (pool(1, 6, 16), Instant::now());
    cache(&pool, b"ab", now);
    let quarantined = reserve(&pool, &hashes(b"abcd"), 4, now).unwrap().quarantine(9);
    assert_eq!(quarantined.blocks().total(), 2);
    assert_eq!((pool.counts().quarantined, pool.counts().cached, cached(&pool, b"ab")), (2, 2, 2));
    quarantined.release();
    assert_eq!(pool.counts().free, 4);
}

#[test]
fn followers_hear_everything_or_that_they_missed_something() {
    let (pool, now) = (pool(1, 4, 16), Instant::now());
    let (known, start) = pool.snapshot().unwrap();
    assert!(known.is_empty());
    cache(&pool, b"abc", now);
    drop(pool.try_lease(&[3]).unwrap());
    let abc = hashes(b"abc");
    let (changes, next) = pool.changes_since(start, 100).unwrap();
    assert_eq!(changes, [Change::Stored(abc.clone()), Change::Removed(vec![abc[2], abc[1]])]);
    assert_eq!((pool.changes_since(next, 100).unwrap().0, pool.snapshot().unwrap()), (vec![], (vec![abc[0]], next)));
}

#[test]
#[should_panic(expected = "cached under another hash")]
fn a_block_has_one_name() {
    let (pool, now) = (pool(1, 4, 16), Instant::now());
    cache(&pool, b"ab", now);
    let mut lease = reserve(&pool, &hashes(b"ab"), 2, now).unwrap();
    lease.store(&hashes(b"xy"), 32, Keep::idle(TTL), now);
}
