use super::*;
use crate::placement::{Measured, Own};
use crate::port::{CacheReport, CacheReportChange as Change};
use crate::testing::{layout, record};
use baton_kv_cache::{CacheConfig, CacheFeed, FeedChange, Fill, Keep, PoolShape, PrefixHasher, Reserve, SharedPool};
use baton_types::{Digest, Role, SystemClock};
use prometheus_client::registry::Registry;

fn prefixes(blocks_max: usize) -> Arc<Prefixes> {
    Arc::new(Prefixes::new(blocks_max, [1, 2], PrefixMetrics::register(&mut Registry::default())))
}

fn hashes(groups: usize) -> Arc<[PrefixHash]> {
    let tokens: Vec<u32> = (0..16 * groups as u32).collect();
    PrefixHasher::new(&Digest([1; 32]), b"salt").prompt(&tokens, &[]).into()
}

type Report = Result<CacheReport, &'static str>;

fn report(sequence: u64, change: Change, blocks: &[PrefixHash]) -> Report {
    Ok(CacheReport { sequence, change, blocks: blocks.to_vec() })
}

fn snapshot(blocks: &[PrefixHash]) -> Report {
    report(0, Change::Snapshot { part: 0, last: true }, blocks)
}

fn stored(sequence: u64, blocks: &[PrefixHash]) -> Report {
    report(sequence, Change::Stored, blocks)
}

fn start(name: &str, incarnation: u64) -> InstanceRecord {
    let mut record = record(Role::Prefill, name);
    record.party.incarnation = Incarnation(incarnation);
    record
}

#[test]
fn a_worker_counts_from_its_snapshot_to_the_end_of_its_stream() {
    let (prefixes, p) = (prefixes(100), start("p", 1));
    let prompt = hashes(6);
    let tokens = || prefixes.lookup(&prompt, &SystemClock).tokens(&p.party);
    let mut follower = prefixes.follow(&p);
    assert_eq!(prefixes.counts().workers, 0, "who says nothing of its cache is no worker without a snapshot");
    follower.take(&snapshot(&prompt[..2])).unwrap();
    assert_eq!(tokens(), 32);
    follower.take(&stored(1, &prompt[2..5])).unwrap();
    assert_eq!(tokens(), 80);
    follower.take(&report(2, Change::Removed, &prompt[4..5])).unwrap();
    assert_eq!(tokens(), 64);
    assert_eq!(follower.take(&stored(4, &prompt[4..])), Err(Dropped::Missed));
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
    let prompt = hashes(6);
    let tokens = |of: &InstanceRecord| prefixes.lookup(&prompt, &SystemClock).tokens(&of.party);
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
    assert_eq!(prefixes.follow(&p).take(&Err("broken")), Err(Dropped::Malformed("broken")));
    assert_eq!(prefixes.follow(&p).take(&snapshot(&hashes(1))), Ok(()));
    assert_eq!(prefixes.counts().workers, 0);
    let mut followers: Vec<_> =
        (0..PrefixIndex::WORKERS_MAX).map(|worker| prefixes.follow(&start(&format!("w{worker}"), 1))).collect();
    followers.iter_mut().for_each(|follower| follower.take(&snapshot(&[])).unwrap());
    assert!(matches!(prefixes.follow(&p).take(&snapshot(&[])), Err(Dropped::Refused(_))));
}

#[test]
fn placement_sees_what_is_cached_and_what_is_coming() {
    let (prefixes, p) = (prefixes(100), start("p", 1));
    let q = InstanceRecord { layout: layout(32, 2), ..start("q", 1) };
    let prompt = hashes(7);
    let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
    let seen = |now| {
        let mut view: Vec<Worker> = [&p, &q]
            .map(|record| Worker {
                record: Arc::new(record.clone()),
                group: None,
                load: Measured::default(),
                own: Own::default(),
                not_with: Vec::new(),
                cached_tokens: 0,
            })
            .into();
        prefixes.fill(&prompt, &prefixes.lookup(&prompt, &SystemClock), &mut view, now);
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
fn a_worker_that_reports_more_blocks_than_it_has_is_dropped() {
    let (prefixes, honest) = (prefixes(1000), start("honest", 1));
    let liar = InstanceRecord { capacity_tokens: 4 * 16, ..start("liar", 1) };
    let prompt = hashes(8);
    let tokens = || [&honest, &liar].map(|of| prefixes.lookup(&prompt, &SystemClock).tokens(&of.party));
    let mut other = prefixes.follow(&honest);
    other.take(&snapshot(&prompt)).unwrap();
    let mut follower = prefixes.follow(&liar);
    follower.take(&snapshot(&prompt[..3])).unwrap();
    // What was reported before counts once, and what is removed makes room.
    follower.take(&stored(1, &prompt[..4])).unwrap();
    follower.take(&report(2, Change::Removed, &prompt[2..4])).unwrap();
    follower.take(&stored(3, &prompt[2..4])).unwrap();
    assert_eq!(tokens(), [128, 64]);
    assert!(matches!(follower.take(&stored(4, &prompt[4..5])), Err(Dropped::Malformed(_))));
    drop(follower);
    assert_eq!(tokens(), [128, 0]);
    // A snapshot that never ends is counted too.
    let mut follower = prefixes.follow(&liar);
    let part = |part: usize| report(0, Change::Snapshot { part: part as u32, last: false }, &prompt[2 * part..][..2]);
    follower.take(&part(0)).unwrap();
    follower.take(&part(1)).unwrap();
    assert!(matches!(follower.take(&part(2)), Err(Dropped::Malformed(_))));
}

#[test]
fn a_full_index_refuses_the_rest() {
    let (prefixes, p) = (prefixes(4), start("p", 1));
    let prompt = hashes(6);
    prefixes.follow(&p).take(&snapshot(&prompt)).unwrap();
    let mut follower = prefixes.follow(&p);
    while prefixes.state.write().index.sweep(1 << 20) {}
    follower.take(&snapshot(&prompt)).unwrap();
    assert_eq!((prefixes.lookup(&prompt, &SystemClock).tokens(&p.party), prefixes.counts().refused), (64, 4));
}

#[test]
fn the_index_follows_a_real_pool() {
    let config = CacheConfig { pinned_max: 0, pinned_of_one_max: 0, changes_max: 8 };
    let pool = SharedPool::with_cache(PoolShape::full(1, 16, 16), config).unwrap();
    let (prefixes, p, now) = (prefixes(100), start("p", 1), Instant::now());
    let prompt = hashes(12);
    let (mut follower, mut feed) = (prefixes.follow(&p), CacheFeed::new(pool.clone()));
    for groups in [3, 6, 12] {
        let (tokens, fill) = (16 * groups, Fill::Computed { chunk: 16 });
        let wanted = Reserve { hashes: &prompt, reuse_tokens_max: tokens, tokens, fill, keep_free: &[], now };
        let mut lease = pool.try_reserve(wanted).unwrap();
        lease.store(&prompt, 16 * groups, Keep::idle(Duration::from_secs(9)), now);
        drop(lease);
        while let Some(update) = feed.next_update() {
            let (change, blocks) = match &update.change {
                FeedChange::Stored(blocks) => (Change::Stored, blocks),
                FeedChange::Removed(blocks) => (Change::Removed, blocks),
                FeedChange::Snapshot { part, last, blocks } => (Change::Snapshot { part: *part, last: *last }, blocks),
            };
            follower.take(&report(update.sequence, change, blocks)).unwrap();
        }
        assert_eq!(prefixes.lookup(&prompt, &SystemClock).tokens(&p.party), 16 * groups);
    }
}
