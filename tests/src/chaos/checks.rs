//! What must hold after a repair, and when nothing runs.

use super::judge::{Acting, Judge};
use super::lanes::Scene;
use super::stage::{Node, Stage};
use crate::quiet::QUIET_MAX;
use crate::scrape::Scrape;
use futures::future::join_all;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use tokio::time::{sleep, sleep_until, timeout};

/// The promise: so long after a repair each pair of workers hands KV over again, and routers place on both.
const PAIRS_MAX: Duration = Duration::from_secs(5);
/// The promise: so long after a peer's resume, death or fenced reconnect nothing of it is quarantined.
const QUARANTINE_MAX: Duration = Duration::from_secs(1);
/// Longest wait for the numbers of a process that is well.
const SCRAPE_MAX: Duration = Duration::from_secs(2);
/// Looks are so far apart.
const LOOK: Duration = Duration::from_millis(25);

/// How long what was repaired took to be as before.
#[derive(Clone, Debug)]
pub struct Settled {
    /// Until each pair carried a handoff, of those that no other fault met before.
    pub pairs: Vec<Duration>,
    /// Until routers placed on all workers.
    pub admitted: Duration,
    /// Until nothing was quarantined.
    pub quarantine: Duration,
}

/// Waits until all is as before `acting`, which was repaired at `since`, and tells the judge what is not in time.
pub async fn settle(scene: Scene<'_>, acting: &Acting, since: Instant) -> Settled {
    let (pairs, admitted, quarantine) = tokio::join!(
        pairs(scene, acting, since),
        admitted(scene, acting, since),
        quarantine(scene, acting, since, Node::WORKERS.to_vec())
    );
    Settled { pairs, admitted, quarantine }
}

async fn scrape(stage: &Stage, node: Node) -> Option<Scrape> {
    timeout(SCRAPE_MAX, Scrape::of(&stage.metrics(node))).await.ok()?.ok()
}

/// Each pair, but those that another fault touches, carries a handoff within [`PAIRS_MAX`]: after how long each did.
async fn pairs(scene: Scene<'_>, acting: &Acting, since: Instant) -> Vec<Duration> {
    let pairs = Node::PREFILL.into_iter().flat_map(|prefill| Node::DECODE.map(|decode| (prefill, decode)));
    join_all(pairs.map(|pair| carries(scene, acting, since, pair))).await.into_iter().flatten().collect()
}

async fn carries(scene: Scene<'_>, acting: &Acting, since: Instant, pair: (Node, Node)) -> Option<Duration> {
    let Scene { stage, handoffs, judge, .. } = scene;
    let (prefill, decode) = pair;
    let (at, last) = (Mutex::new("begins"), Mutex::new("none failed".to_owned()));
    let carried = async {
        loop {
            match handoffs.one(stage, pair, |now| *at.lock() = now).await {
                Ok(wrong) => return wrong,
                Err(why) => *last.lock() = format!("{why:#}"),
            }
            sleep(LOOK).await;
        }
    };
    let broken = tokio::select! {
        wrong = carried => wrong.map(|wrong| format!("a handoff from {prefill} to {decode} is wrong: {wrong}")),
        () = touched(judge, acting, since, [prefill, decode]) => return None,
        () = sleep_until((since + PAIRS_MAX).into()) => {
            let (at, last) = (at.lock(), last.lock());
            Some(format!("no handoff in {PAIRS_MAX:?} from {prefill} to {decode}: one {at}, and before it: {last}"))
        }
    };
    let took = since.elapsed();
    if let Some(what) = broken {
        judge.breach((since, Instant::now()), what);
    }
    Some(took)
}

/// Returns once a fault other than `acting` touches one of them.
async fn touched(judge: &Judge, acting: &Acting, since: Instant, nodes: [Node; 2]) {
    while !nodes.into_iter().any(|node| judge.touched_since(since, node, acting)) {
        sleep(LOOK).await;
    }
}

/// Looks until nothing is amiss, at most `max` from `since` on: then `promise` is broken. How long it took.
async fn until_well(
    judge: &Judge,
    since: Instant,
    max: Duration,
    promise: String,
    mut look: impl AsyncFnMut() -> Vec<String>,
) -> Duration {
    loop {
        let amiss = look().await;
        let passed = since.elapsed();
        if amiss.is_empty() {
            return passed;
        }
        if passed > max {
            judge.breach((since, Instant::now()), format!("{promise}: {}", amiss.join("; ")));
            return passed;
        }
        sleep(LOOK).await;
    }
}

/// Routers, but those that another fault touches, place on all workers that no other fault touches, within [`PAIRS_MAX`].
async fn admitted(scene: Scene<'_>, acting: &Acting, since: Instant) -> Duration {
    let Scene { stage, judge, .. } = scene;
    let untouched = |node: &Node| !judge.touched_since(since, *node, acting);
    until_well(judge, since, PAIRS_MAX, format!("after {PAIRS_MAX:?}"), async || {
        let mut missing = Vec::new();
        for router in Node::ROUTERS.into_iter().filter(untouched) {
            let ready = scrape(stage, router).await;
            for (role, workers) in [("prefill", Node::PREFILL), ("decode", Node::DECODE)] {
                let ready = ready.as_ref().map_or(0.0, |s| s.sum("baton_router_ready_workers", &[role]));
                let all = workers.into_iter().filter(untouched).count();
                if untouched(&router) && (ready as usize) < all {
                    missing.push(format!("{router} has {ready} of {all} {role} workers"));
                }
            }
        }
        missing
    })
    .await
}

/// Nothing is quarantined on these workers, but those that another fault touches, at some moment within a second.
pub async fn quarantine(scene: Scene<'_>, acting: &Acting, since: Instant, workers: Vec<Node>) -> Duration {
    let Scene { stage, judge, .. } = scene;
    let untouched = |node: &Node| !judge.touched_since(since, *node, acting);
    let mut left = workers;
    until_well(judge, since, QUARANTINE_MAX, format!("blocks quarantined after {QUARANTINE_MAX:?}"), async || {
        let mut still = Vec::new();
        for node in std::mem::take(&mut left).into_iter().filter(untouched) {
            let blocks = scrape(stage, node).await.map(|s| s.sum("baton_kv_blocks", &["quarantined"]));
            if blocks.is_none_or(|n| n > 0.0) && untouched(&node) {
                left.push(node);
                still.push(blocks.map_or(format!("{node} does not answer"), |n| format!("{node} has {n}")));
            }
        }
        still
    })
    .await
}

/// Nobody asks and nothing is broken: within [`QUIET_MAX`] no worker references or quarantines a block, and routers hold no request.
pub async fn quiet(stage: &Stage, judge: &Judge) -> Duration {
    until_well(judge, Instant::now(), QUIET_MAX, format!("{QUIET_MAX:?} after the last request"), async || {
        let mut busy = Vec::new();
        for node in Node::ALL {
            let Some(scrape) = scrape(stage, node).await else {
                busy.push(format!("{node} does not answer"));
                continue;
            };
            let series: [(&str, &[&str]); 5] = [
                ("baton_kv_blocks", &["referenced"]),
                ("baton_kv_blocks", &["quarantined"]),
                ("baton_sequences_running", &[]),
                ("baton_sequences_waiting", &[]),
                ("baton_router_requests_in_flight", &[]),
            ];
            for (name, labels) in series {
                let n = scrape.sum(name, labels);
                if n > 0.0 {
                    busy.push(format!("{node}: {name} {labels:?} {n}"));
                }
            }
        }
        busy
    })
    .await
}
