use super::*;
use crate::placement::Measured;
use crate::testing::{layout, record};
use baton_kv_cache::{CacheConfig, CacheFeed, FeedChange, Keep, PrefixHasher, Reserve, SharedPool};
use baton_proto::v1::{self, cache_update::Change};
use baton_types::{Digest, Role};
use prometheus_client::registry::Registry;

fn prefixes(blocks_max: usize) -> Arc<Prefixes> {
    Arc::new(Prefixes::new(blocks_max, PrefixMetrics::register(&mut Registry::default())))
}

fn names(groups: usize) -> Arc<[PrefixHash]> {
    let tokens: Vec<u32> = (0..16 * groups as u32).collect();
    PrefixHasher::new(&Digest([1; 32]), b"salt").prompt(&tokens, &[]).into()
}

fn bytes(names: &[PrefixHash]) -> Vec<u8> {
    names.iter().flat_map(|name| name.0).collect()
}

fn snapshot(names: &[PrefixHash]) -> v1::CacheUpdate {
    let snapshot = v1::CacheSnapshot { part: 0, last: true, names: bytes(names).into() };
    v1::CacheUpdate { sequence: 0, change: Some(Change::Snapshot(snapshot)) }
}

fn stored(sequence: u64, names: &[PrefixHash]) -> v1::CacheUpdate {
    v1::CacheUpdate { sequence, change: Some(Change::Stored(bytes(names).into())) }
}

fn start(name: &str, incarnation: u64) -> InstanceRecord {
    let mut record = record(Role::Prefill, name);
    record.party.incarnation = Incarnation(incarnation);
    record
}

#[test]
fn a_worker_counts_from_its_snapshot_to_the_end_of_its_stream() {
    let (prefixes, p) = (prefixes(100), start("p", 1));
    let prompt = names(6);
    let tokens = || prefixes.lookup(&prompt).tokens(&p.party);
    let mut follower = prefixes.follow(&p);
    assert_eq!(prefixes.counts().workers, 0, "who says nothing of its cache is no worker without a snapshot");
    follower.take(&snapshot(&prompt[..2])).unwrap();
    assert_eq!(tokens(), 32);
    follower.take(&stored(1, &prompt[2..5])).unwrap();
    assert_eq!(tokens(), 80);
    let removed = v1::CacheUpdate { sequence: 2, change: Some(Change::Removed(bytes(&prompt[4..5]).into())) };
    follower.take(&removed).unwrap();
    assert_eq!(tokens(), 64);
    assert_eq!(follower.take(&stored(4, &prompt[4..])), Err(Forgotten::Missed));
    assert_eq!((tokens(), prefixes.counts().workers_lost), (0, 1));
    let mut again = prefixes.follow(&p);
    again.take(&snapshot(&prompt)).unwrap();
    drop(follower);
    assert_eq!(tokens(), 96, "the end of a stream ends nothing of the next one");
    drop(again);
    assert_eq!((tokens(), prefixes.counts().workers), (0, 0));
}

#[test]
fn of_the_starts_of_an_instance_the_last_one_counts() {
    let (prefixes, old, new) = (prefixes(100), start("p", 1), start("p", 2));
    let prompt = names(6);
    let tokens = |of: &InstanceRecord| prefixes.lookup(&prompt).tokens(&of.party);
    let (mut before, mut after) = (prefixes.follow(&old), prefixes.follow(&new));
    before.take(&snapshot(&prompt)).unwrap();
    assert_eq!((tokens(&old), tokens(&new)), (96, 0));
    after.take(&snapshot(&prompt[..1])).unwrap();
    assert_eq!((tokens(&old), tokens(&new)), (0, 16), "nothing of what was there before the restart");
    before.take(&stored(1, &prompt)).unwrap();
    drop(before);
    assert_eq!((tokens(&old), tokens(&new)), (0, 16));
}

#[test]
fn what_is_no_update_is_not_taken() {
    let (prefixes, p) = (prefixes(100), start("p", 1));
    let too_many: Vec<PrefixHash> = vec![PrefixHash([1; 16]); FEED_NAMES_MAX + 1];
    let ragged = v1::CacheUpdate { sequence: 0, change: Some(Change::Stored(vec![0; 17].into())) };
    for update in [v1::CacheUpdate::default(), ragged, snapshot(&too_many)] {
        assert!(matches!(prefixes.follow(&p).take(&update), Err(Forgotten::Malformed(_))), "{update:?}");
    }
    assert_eq!(prefixes.follow(&p).take(&snapshot(&too_many[1..])), Ok(()));
    assert_eq!(prefixes.counts().workers, 0);
    let mut followers: Vec<_> =
        (0..PrefixIndex::WORKERS_MAX).map(|worker| prefixes.follow(&start(&format!("w{worker}"), 1))).collect();
    followers.iter_mut().for_each(|follower| follower.take(&snapshot(&[])).unwrap());
    assert!(matches!(prefixes.follow(&p).take(&snapshot(&[])), Err(Forgotten::Refused(_))));
}

#[test]
fn placement_sees_what_is_cached_and_what_is_coming() {
    let (prefixes, p) = (prefixes(100), start("p", 1));
    let q = InstanceRecord { layout: layout(32, 2), ..start("q", 1) };
    let prompt = names(7);
    let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
    let seen = |now| {
        let mut view: Vec<Worker> = [&p, &q]
            .map(|record| Worker {
                record: Arc::new(record.clone()),
                group: None,
                load: Measured::default(),
                not_with: Vec::new(),
                cached_tokens: 0,
            })
            .into();
        prefixes.fill(&prompt, &prefixes.lookup(&prompt), &mut view, now);
        [view[0].cached_tokens, view[1].cached_tokens]
    };
    let mut follower = prefixes.follow(&p);
    follower.take(&snapshot(&prompt[..3])).unwrap();
    assert_eq!(seen(now), [48, 0]);
    assert!(prefixes.coming(&q.party, &prompt, later).is_none(), "it tells of no cache, so nothing may be left there");
    let mut other = prefixes.follow(&q);
    other.take(&snapshot(&[])).unwrap();
    assert!(prefixes.coming(&start("q", 2).party, &prompt, later).is_none(), "another start of it");
    let first = prefixes.coming(&q.party, &prompt[..5].into(), later);
    let second = prefixes.coming(&p.party, &prompt, later);
    assert_eq!(seen(now), [112, 64], "whole blocks of theirs");
    assert_eq!(seen(later), [48, 0], "it never came");
    drop((first, second));
    assert_eq!(seen(now), [48, 0]);
    let _coming = prefixes.coming(&p.party, &prompt, later);
    drop(follower);
    assert_eq!(seen(now), [0, 0], "a worker that cannot be heard may not have begun");
}

#[test]
fn a_full_index_refuses_the_rest() {
    let (prefixes, p) = (prefixes(4), start("p", 1));
    let prompt = names(6);
    prefixes.follow(&p).take(&snapshot(&prompt)).unwrap();
    let mut follower = prefixes.follow(&p);
    while prefixes.state.write().index.sweep(1 << 20) {}
    follower.take(&snapshot(&prompt)).unwrap();
    assert_eq!((prefixes.lookup(&prompt).tokens(&p.party), prefixes.counts().refused), (64, 4));
}

#[test]
fn the_index_follows_a_real_pool() {
    let config = CacheConfig { block_tokens: 16, pinned_max: 0, pinned_of_one_max: 0, changes_max: 8 };
    let pool = SharedPool::with_cache(1, 16, config).unwrap();
    let (prefixes, p, now) = (prefixes(100), start("p", 1), Instant::now());
    let prompt = names(12);
    let (mut follower, mut feed) = (prefixes.follow(&p), CacheFeed::new(pool.clone()));
    for groups in [3, 6, 12] {
        let wanted = Reserve { names: &prompt, reuse_tokens_max: 16 * groups, blocks: groups, keep_free: 0, now };
        let mut lease = pool.try_reserve(wanted).unwrap();
        lease.store(&prompt, 16 * groups, Keep::idle(Duration::from_secs(9)), now);
        drop(lease);
        while let Some(update) = feed.next_update() {
            let change = match &update.change {
                FeedChange::Stored(blocks) => Change::Stored(bytes(blocks).into()),
                FeedChange::Removed(blocks) => Change::Removed(bytes(blocks).into()),
                FeedChange::Snapshot { part, last, blocks } => {
                    Change::Snapshot(v1::CacheSnapshot { part: *part, last: *last, names: bytes(blocks).into() })
                }
            };
            follower.take(&v1::CacheUpdate { sequence: update.sequence, change: Some(change) }).unwrap();
        }
        assert_eq!(prefixes.lookup(&prompt).tokens(&p.party), 16 * groups);
    }
}
