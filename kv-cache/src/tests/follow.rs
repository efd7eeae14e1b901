//! Feeds, and an index that follows a pool over a channel that loses, duplicates and reorders messages.

use super::{TTL, hashes};
use crate::{
    Applied, CacheConfig, CacheFeed, FEED_HASHES_MAX, FeedChange, FeedUpdate, Fill, Keep, PoolShape, PrefixHash,
    PrefixIndex, Reserve, SharedPool,
};
use baton_types::{Incarnation, InstanceId};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Instant;

fn pool(blocks: u32, changes_max: usize) -> SharedPool {
    let config = CacheConfig { pinned_max: 0, pinned_of_one_max: 0, changes_max };
    SharedPool::with_cache(PoolShape::full(1, blocks, 16), config).unwrap()
}

/// Caches a prompt, or as much of it as there is room for.
fn cache(pool: &SharedPool, hashes: &[PrefixHash], now: Instant) {
    let fill = Fill::Computed { chunk: 16 };
    let wanted = Reserve { hashes, reuse_tokens_max: usize::MAX, tokens: hashes.len() * 16, fill, keep_free: &[], now };
    if let Some(mut lease) = pool.try_reserve(wanted) {
        lease.store(hashes, hashes.len() * 16, Keep::idle(TTL), now);
    }
}

/// All updates that there are now.
fn told(feed: &mut CacheFeed) -> Vec<FeedUpdate> {
    std::iter::from_fn(|| feed.next_update()).collect()
}

fn set(hashes: &[PrefixHash]) -> BTreeSet<PrefixHash> {
    hashes.iter().copied().collect()
}

#[test]
fn a_snapshot_comes_first_and_then_what_changes() {
    let (pool, now) = (pool(4, 100), Instant::now());
    let (old, new) = (hashes(b"ab"), hashes(b"xyz"));
    cache(&pool, &old, now);
    let mut feed = CacheFeed::new(pool.clone());
    let first = told(&mut feed);
    let [FeedUpdate { sequence: 0, change: FeedChange::Snapshot { part: 0, last: true, blocks } }] = &first[..] else {
        panic!("{first:?}");
    };
    assert_eq!(set(blocks), set(&old));
    assert!(!feed.has_more() && told(&mut feed).is_empty());
    // One of the four blocks is evicted for it.
    cache(&pool, &new, now);
    let then = told(&mut feed);
    let [
        FeedUpdate { sequence: 1, change: FeedChange::Removed(removed) },
        FeedUpdate { sequence: 2, change: FeedChange::Stored(stored) },
    ] = &then[..]
    else {
        panic!("{then:?}");
    };
    assert_eq!((removed.as_slice(), set(stored)), (&old[1..], set(&new)));
}

#[test]
fn what_came_and_went_since_is_told_as_gone() {
    let (pool, now) = (pool(8, 100), Instant::now());
    let mut feed = CacheFeed::new(pool.clone());
    told(&mut feed);
    cache(&pool, &hashes(b"ab"), now);
    pool.clear_cache();
    let both = told(&mut feed);
    assert!(matches!(&both[..], [FeedUpdate { sequence: 1, change: FeedChange::Removed(n) }] if n.len() == 2));
}

#[test]
fn who_is_behind_the_log_gets_a_snapshot_with_the_next_number() {
    let (pool, now) = (pool(64, 4), Instant::now());
    let mut feed = CacheFeed::new(pool.clone());
    told(&mut feed);
    cache(&pool, &hashes(b"abcdefgh"), now);
    let late = told(&mut feed);
    let [FeedUpdate { sequence: 1, change: FeedChange::Snapshot { part: 0, last: true, blocks } }] = &late[..] else {
        panic!("{late:?}");
    };
    assert_eq!(set(blocks), set(&hashes(b"abcdefgh")));
    cache(&pool, &hashes(b"z"), now);
    assert!(matches!(&told(&mut feed)[..], [FeedUpdate { sequence: 2, change: FeedChange::Stored(_) }]));
}

#[test]
fn snapshots_come_in_parts_and_changes_in_the_meantime_behind_them() {
    let (pool, now) = (pool(2000, 4000), Instant::now());
    for first in 0..6 {
        let symbols: Vec<u8> = [first; 200].into();
        cache(&pool, &hashes(&symbols), now);
    }
    let mut feed = CacheFeed::new(pool.clone());
    let first = feed.next_update();
    cache(&pool, &hashes(b"zz"), now);
    let rest = told(&mut feed);
    let sizes = first.iter().chain(&rest).map(|update| match &update.change {
        FeedChange::Snapshot { part, last, blocks } => (Some((*part, *last)), blocks.len()),
        FeedChange::Stored(blocks) | FeedChange::Removed(blocks) => (None, blocks.len()),
    });
    let most = FEED_HASHES_MAX;
    let expected = [(Some((0, false)), most), (Some((1, false)), most), (Some((2, true)), 1200 - 2 * most), (None, 2)];
    assert_eq!(sizes.collect::<Vec<_>>(), expected);
}

#[test]
fn a_pool_without_a_cache_tells_nothing() {
    let mut feed = CacheFeed::new(SharedPool::try_new(PoolShape::full(1, 8, 16)).unwrap());
    assert_eq!(feed.next_update(), None);
}

/// A router's side: its index of the one worker, and how it requests a snapshot.
struct Follower {
    index: PrefixIndex,
    worker: InstanceId,
    incarnation: Incarnation,
}

impl Follower {
    fn reopen(&mut self, pool: &SharedPool) -> CacheFeed {
        self.index.leave(&self.worker);
        self.index.join(&self.worker, self.incarnation, 16).unwrap();
        CacheFeed::new(pool.clone())
    }

    /// Applies an update; returns whether nothing is missing as far as it knows.
    fn take(&mut self, update: &FeedUpdate) -> bool {
        self.index.apply(&self.worker, update.of(self.incarnation)) != Applied::SnapshotNeeded
    }

    /// Which of these it considers cached.
    fn believes(&self, prompts: &[Vec<PrefixHash>]) -> BTreeSet<PrefixHash> {
        let held = |prompt: &Vec<PrefixHash>| {
            let found = self.index.lookup(prompt).first().map_or(0, |found| found.tokens / 16);
            prompt[..found].to_vec()
        };
        prompts.iter().flat_map(held).collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Cache(usize),
    Clear,
    /// Advances the time, so that some entries expire.
    Expire,
    /// Sends this many updates.
    Send(usize),
    /// The channel does this to its messages, and the rest arrives.
    Arrive(Wire),
}

#[derive(Clone, Debug)]
enum Wire {
    Whole,
    Loses(usize),
    Doubles(usize),
    Swaps(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let wire = prop_oneof![
        4 => Just(Wire::Whole),
        1 => (0..6usize).prop_map(Wire::Loses),
        1 => (0..6usize).prop_map(Wire::Doubles),
        1 => (0..6usize).prop_map(Wire::Swaps),
    ];
    prop_oneof![
        6 => (0..PROMPTS.len()).prop_map(Step::Cache),
        1 => Just(Step::Clear),
        1 => Just(Step::Expire),
        5 => (1..4usize).prop_map(Step::Send),
        5 => wire.prop_map(Step::Arrive),
    ]
}

const PROMPTS: [&[u8]; 8] = [b"abc", b"abde", b"ab", b"xyz", b"xyzuvw", b"q", b"abcfghij", b"klmno"];

proptest! {
    #[test]
    fn an_index_follows_a_pool_whatever_the_wire_does(
        steps in prop::collection::vec(step(), 1..80),
        blocks in 6u32..40,
        changes_max in 1usize..30,
    ) {
        let prompts: Vec<_> = PROMPTS.iter().map(|symbols| hashes(symbols)).collect();
        let (pool, mut now) = (pool(blocks, changes_max), Instant::now());
        let id = InstanceId::try_new("w").unwrap();
        let mut follower = Follower { index: PrefixIndex::new(1000, [1, 2]), worker: id, incarnation: Incarnation(1) };
        let mut feed = follower.reopen(&pool);
        let mut wire: Vec<FeedUpdate> = Vec::new();
        // Everything cached since the follower's state was exact.
        let mut ever: BTreeSet<PrefixHash> = BTreeSet::new();
        for step in steps {
            match step {
                Step::Cache(prompt) => cache(&pool, &prompts[prompt], now),
                Step::Clear => pool.clear_cache(),
                Step::Expire => {
                    now += TTL / 2;
                    pool.expire(now);
                }
                Step::Send(updates) => wire.extend((0..updates).map_while(|_| feed.next_update())),
                Step::Arrive(what) => {
                    match what {
                        Wire::Loses(i) if i < wire.len() => drop(wire.remove(i)),
                        Wire::Doubles(i) if i < wire.len() => wire.push(wire[i].clone()),
                        Wire::Swaps(i) if i + 1 < wire.len() => wire.swap(i, i + 1),
                        _ => {}
                    }
                    let whole = wire.iter().all(|update| follower.take(update));
                    wire.clear();
                    if !whole {
                        feed = follower.reopen(&pool);
                    }
                }
            }
            ever.extend(pool.snapshot().unwrap().0);
            prop_assert!(follower.believes(&prompts).is_subset(&ever), "it believes in what never was");
        }
        // A round trip later: every message in the channel arrives, or a gap is detected.
        wire.extend(told(&mut feed));
        if !wire.iter().all(|update| follower.take(update)) || follower.index.is_lost(&follower.worker) {
            feed = follower.reopen(&pool);
            prop_assert!(told(&mut feed).iter().all(|update| follower.take(update)));
        }
        let cached = set(&pool.snapshot().unwrap().0);
        // A loss at the very end is detected only with the next update.
        let blind = follower.believes(&prompts) != cached;
        if blind {
            cache(&pool, &hashes(b"!"), now);
            if !told(&mut feed).iter().all(|update| follower.take(update)) {
                feed = follower.reopen(&pool);
                prop_assert!(told(&mut feed).iter().all(|update| follower.take(update)));
            }
        }
        let cached = set(&pool.snapshot().unwrap().0);
        let mut all = prompts.clone();
        all.push(hashes(b"!"));
        prop_assert_eq!(follower.believes(&all), cached);
        prop_assert_eq!(follower.index.blocks_of(&follower.worker), follower.believes(&all).len());
    }
}
