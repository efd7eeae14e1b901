//! The reports that routers receive of a worker's prefix cache, from the service of a real engine.

use super::{FIRST, FOREVER, Granting, pair, pair_to, request};
use baton_engine::EngineHandle;
use baton_kv_cache::{
    Applied, CacheChange, CacheUpdate, Fill, Keep, PrefixHash, PrefixHasher, PrefixIndex, Reserve, SharedPool,
};
use baton_kv_transfer::{KvTransfer, NoHooks};
use baton_node::TokioRuntime;
use baton_node::membership::conformance;
use baton_proto::v1::prefill_server::Prefill;
use baton_proto::v1::{self, cache_update::Change, worker_server::Worker};
use baton_types::Digest;
use baton_worker::drain::Drain;
use baton_worker::grpc::Replies;
use baton_worker::report::cache_changes;
use baton_worker::role::Parts;
use baton_worker::service::{Claimed, WorkerService};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::Request;

type Reports = Replies<v1::LoadReport>;

/// The service of a prefill worker, its pool, and a transfer that must live as long as they do.
fn worker() -> (WorkerService, SharedPool, KvTransfer) {
    let (service, other) = pair();
    let Parts { engine, transfer, .. } = service.parts;
    let pool = engine.pool();
    (service_of(engine, transfer), pool, other)
}

fn service_of(engine: EngineHandle, transfer: KvTransfer) -> WorkerService {
    let runtime = Arc::new(TokioRuntime::current());
    WorkerService {
        party: transfer.party().clone(),
        record: conformance::record("p", 1),
        cache_changed: cache_changes(&engine.pool()),
        adapters: None,
        engine,
        transfer,
        bundle: None,
        claimed: Arc::new(Claimed::default),
        drain: Drain::new(runtime.clone()),
        drain_max: FOREVER,
        stop: CancellationToken::new(),
        runtime,
    }
}

async fn watch(service: &WorkerService, cache_events: bool) -> Reports {
    let request = v1::WatchRequest { router: "test".into(), cache_events, adapters: true };
    service.watch(Request::new(request)).await.unwrap().into_inner()
}

/// The next report, within the time that a worker may take for it.
async fn next(reports: &mut Reports) -> v1::LoadReport {
    timeout(FOREVER, reports.next()).await.expect("reports go on").unwrap().unwrap()
}

/// The next report on the cache.
async fn told(reports: &mut Reports) -> v1::CacheUpdate {
    loop {
        let report = next(reports).await;
        if let Some(update) = report.cache {
            assert!(!report.healthy && report.blocks.is_none(), "it is no report of load");
            return update;
        }
    }
}

fn prompt(salt: u32, groups: u32) -> Vec<PrefixHash> {
    let tokens: Vec<u32> = (0..16 * groups).map(|t| t + 1000 * salt).collect();
    PrefixHasher::new(&Digest([1; 32]), b"").prompt(&tokens, &[])
}

fn cache(pool: &SharedPool, hashes: &[PrefixHash]) {
    let now = Instant::now();
    let fill = Fill::Computed { chunk: 16 };
    let tokens = hashes.len() * 16;
    let wanted = Reserve { hashes, reuse_tokens_max: usize::MAX, tokens, fill, keep_free: &[], now };
    let mut lease = pool.try_reserve(wanted).unwrap();
    lease.store(hashes, hashes.len() * 16, Keep::idle(FOREVER), now);
}

fn hashes(bytes: &[u8]) -> Vec<PrefixHash> {
    bytes.as_chunks().0.iter().map(|name| PrefixHash(*name)).collect()
}

fn sorted(hashes: &[PrefixHash]) -> Vec<u8> {
    let mut sorted = hashes.to_vec();
    sorted.sort();
    sorted.iter().flat_map(|name| name.0).collect()
}

#[tokio::test]
async fn routers_hear_of_the_cache_from_the_start_on() {
    let (service, pool, _other) = worker();
    let (old, new) = (prompt(1, 3), prompt(2, 5));
    cache(&pool, &old);
    let mut reports = watch(&service, true).await;
    assert!(next(&mut reports).await.cache.is_none(), "load comes first");
    let first = told(&mut reports).await;
    let Some(Change::Snapshot(snapshot)) = first.change else { panic!("{first:?}") };
    assert_eq!((first.sequence, snapshot.part, snapshot.last), (0, 0, true));
    assert_eq!(sorted(&hashes(&snapshot.hashes)), sorted(&old));
    // Long before the next load report is due; repeated many times, so that it cannot be chance, and no pause of this process counts.
    let mut waits = Vec::new();
    for round in 0..20 {
        let begun = Instant::now();
        cache(&pool, &new);
        let update = told(&mut reports).await;
        waits.push(begun.elapsed());
        let sequence = 1 + 2 * round;
        assert_eq!(update, v1::CacheUpdate { sequence, change: Some(Change::Stored(sorted(&new).into())) });
        pool.clear_cache();
        let update = told(&mut reports).await;
        let gone = if round == 0 { [&old[..], &new].concat() } else { new.clone() };
        let change = Some(Change::Removed(sorted(&gone).into()));
        assert_eq!(update, v1::CacheUpdate { sequence: sequence + 1, change });
    }
    waits.sort_unstable();
    assert!(waits[waits.len() / 2] < Duration::from_millis(500), "{waits:?}");
}

#[tokio::test]
async fn kv_that_moved_counts_at_both_ends() {
    let (service, sink) = pair_to(FIRST, Arc::new(NoHooks), |engine| Arc::new(Granting(engine.pool())));
    let calls = service.run(Request::new(request(&service, &sink))).await.unwrap();
    let events: Vec<_> = calls.into_inner().collect().await;
    assert!(events.iter().all(Result::is_ok), "{events:?}");
    let Parts { engine, transfer, .. } = service.parts;
    // The call ends before its counters are published.
    let counts = || [transfer.stats().total.bytes_put, sink.stats().total.bytes_adopted];
    let counted = async {
        while counts()[0] == 0 || counts()[0] != counts()[1] {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(FOREVER, counted).await.unwrap_or_else(|_| panic!("put and adopted: {:?}", counts()));
    let moved = counts()[0];
    for end in [transfer, sink] {
        let report = next(&mut watch(&service_of(engine.clone(), end), false).await).await;
        assert_eq!(report.kv_bytes, Some(moved));
    }
}

#[tokio::test]
async fn who_does_not_ask_hears_of_load_alone() {
    let (service, pool, _other) = worker();
    let mut reports = watch(&service, false).await;
    for round in 0..3 {
        cache(&pool, &prompt(round, 4));
        assert!(next(&mut reports).await.cache.is_none());
    }
}

#[tokio::test]
async fn a_slow_router_holds_nothing_up_and_is_told_all_in_the_end() {
    let (service, pool, _other) = worker();
    let mut reports = watch(&service, true).await;
    let mut first = Some(told(&mut reports).await);
    // More changes than the feed remembers. This thread is the runtime's only one, so no report is sent meanwhile.
    let rounds = 4 * pool.shape().limiting().blocks / 40;
    for salt in 0..rounds {
        cache(&pool, &prompt(salt, 40));
        pool.clear_cache();
    }
    let last = prompt(9999, 7);
    cache(&pool, &last);
    let (mut index, party) = (PrefixIndex::new(1 << 20, [1, 2]), &service.party);
    index.join(&party.instance, party.incarnation, 16).unwrap();
    let (mut loads, mut snapshots) = (0, Vec::new());
    // Load is still reported, at least once a second.
    while loads == 0 || index.lookup(&last).first().is_none_or(|found| found.tokens < 7 * 16) {
        let update = match first.take() {
            Some(first) => Some(first),
            None => next(&mut reports).await.cache,
        };
        let Some(v1::CacheUpdate { sequence, change }) = update else {
            loads += 1;
            continue;
        };
        let blocks = match change.as_ref().unwrap() {
            Change::Stored(bytes) | Change::Removed(bytes) => hashes(bytes),
            Change::Snapshot(snapshot) => hashes(&snapshot.hashes),
        };
        let change = match change.unwrap() {
            Change::Stored(_) => CacheChange::Stored(&blocks),
            Change::Removed(_) => CacheChange::Removed(&blocks),
            Change::Snapshot(v1::CacheSnapshot { part, last, .. }) => {
                snapshots.push(sequence);
                CacheChange::Snapshot { part, last, blocks: &blocks }
            }
        };
        let update = CacheUpdate { incarnation: party.incarnation, sequence, change };
        assert_eq!(index.apply(&party.instance, update), Applied::Done, "nothing is missing");
    }
    assert!(snapshots.iter().any(|sequence| *sequence > 0), "it was behind: {snapshots:?}");
    assert_eq!(index.blocks_of(&party.instance), pool.snapshot().unwrap().0.len());
}
