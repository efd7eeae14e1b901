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

/// Waits until all is as before `acting`, whose repair took effect at `since`, and tells the judge what is not in time. `restarted` has
/// no pool before its model is loaded.
pub async fn settle(scene: Scene<'_>, acting: &Acting, since: Instant, restarted: Option<Node>) -> Settled {
    let workers = Node::WORKERS.into_iter().filter(|worker| Some(*worker) != restarted).collect();
    let (pairs, admitted, quarantine) = tokio::join!(
        pairs(scene, Some(acting), since),
        admitted(scene, acting, since),
        quarantine(scene, acting, since, workers)
    );
    Settled { pairs, admitted, quarantine }
}

async fn scrape(stage: &Stage, node: Node) -> Option<Scrape> {
    timeout(SCRAPE_MAX, Scrape::of(&stage.metrics(node))).await.ok()?.ok()
}

/// What is to be so again, unless another fault touches one of `nodes` before.
struct Promise<'a> {
    acting: Option<&'a Acting>,
    nodes: &'a [Node],
    since: Instant,
    max: Duration,
}

/// Looks until all is well. After how long it was; `None` where another fault came first. The judge hears of what is not in time, as
/// `amiss` tells it.
async fn kept(
    judge: &Judge,
    Promise { acting, nodes, since, max }: Promise<'_>,
    mut is_well: impl AsyncFnMut() -> bool,
    amiss: impl Fn() -> String,
) -> Option<Duration> {
    let other = async {
        while !nodes.iter().any(|node| judge.touched_since(since, *node, acting)) {
            sleep(LOOK).await;
        }
    };
    let well = async {
        while !is_well().await {
            sleep(LOOK).await;
        }
    };
    let took = tokio::select! {
        biased;
        () = other => return None,
        () = well => since.elapsed(),
        () = sleep_until((since + max).into()) => since.elapsed().max(max + LOOK),
    };
    if took > max {
        judge.breach((since, Instant::now()), format!("not in {max:?}: {}", amiss()));
    }
    Some(took)
}

/// Each pair, but those that another fault touches, carries a handoff within [`PAIRS_MAX`]: after how long each did.
pub async fn pairs(scene: Scene<'_>, acting: Option<&Acting>, since: Instant) -> Vec<Duration> {
    let pairs = Node::PREFILL.into_iter().flat_map(|prefill| Node::DECODE.map(|decode| (prefill, decode)));
    join_all(pairs.map(|pair| carries(scene, acting, since, pair))).await.into_iter().flatten().collect()
}

async fn carries(
    scene: Scene<'_>,
    acting: Option<&Acting>,
    since: Instant,
    (prefill, decode): (Node, Node),
) -> Option<Duration> {
    let Scene { stage, handoffs, judge, .. } = scene;
    let (at, last) = (Mutex::new("begins"), Mutex::new("none failed".to_owned()));
    let is_well = async || match handoffs.one(stage, (prefill, decode), |now| *at.lock() = now).await {
        Ok(None) => true,
        Ok(Some(wrong)) => {
            let what = format!("a handoff from {prefill} to {decode} is wrong: {wrong}");
            judge.breach((since, Instant::now()), what);
            true
        }
        Err(why) => {
            *last.lock() = format!("{why:#}");
            false
        }
    };
    let amiss = || format!("a handoff from {prefill} to {decode}: one {}, and before it: {}", at.lock(), last.lock());
    kept(judge, Promise { acting, nodes: &[prefill, decode], since, max: PAIRS_MAX }, is_well, amiss).await
}

/// Routers, but those that another fault touches, place on all workers that no other fault touches, within [`PAIRS_MAX`].
async fn admitted(scene: Scene<'_>, acting: &Acting, since: Instant) -> Duration {
    let Scene { stage, judge, .. } = scene;
    let one = async |router| {
        let missing = Mutex::new(String::new());
        let is_well = async || {
            let ready = scrape(stage, router).await;
            let found = [("prefill", Node::PREFILL), ("decode", Node::DECODE)].map(|(role, workers)| {
                let untouched = |worker: &Node| !judge.touched_since(since, *worker, Some(acting));
                let all = workers.into_iter().filter(untouched).count();
                let ready = ready.as_ref().map_or(0.0, |s| s.sum("baton_router_ready_workers", &[role]));
                (role, ready as usize, all)
            });
            *missing.lock() = format!("{router} places on (role, ready, all): {found:?}");
            found.iter().all(|(_, ready, all)| ready >= all)
        };
        let promise = Promise { acting: Some(acting), nodes: &[router], since, max: PAIRS_MAX };
        kept(judge, promise, is_well, || missing.lock().clone()).await
    };
    longest(join_all(Node::ROUTERS.map(one)).await)
}

/// Nothing is quarantined on these workers, but those that another fault touches, at some moment within a second.
pub async fn quarantine(scene: Scene<'_>, acting: &Acting, since: Instant, workers: Vec<Node>) -> Duration {
    let Scene { stage, judge, .. } = scene;
    let one = async |worker| {
        let left = Mutex::new("not asked".to_owned());
        let is_well = async || {
            let blocks = scrape(stage, worker).await.map(|s| s.sum("baton_kv_blocks", &["quarantined"]));
            *left.lock() = blocks.map_or("no answer".to_owned(), |blocks| format!("{blocks} blocks"));
            blocks == Some(0.0)
        };
        let promise = Promise { acting: Some(acting), nodes: &[worker], since, max: QUARANTINE_MAX };
        kept(judge, promise, is_well, || format!("nothing quarantined at {worker}: {}", left.lock())).await
    };
    longest(join_all(workers.into_iter().map(one)).await)
}

fn longest(times: impl IntoIterator<Item = Option<Duration>>) -> Duration {
    times.into_iter().flatten().max().unwrap_or_default()
}

/// Nobody asks and nothing is broken: within [`QUIET_MAX`] no worker references or quarantines a block, and routers hold no request.
pub async fn quiet(stage: &Stage, judge: &Judge) -> Duration {
    let (last, since) = (Mutex::new(String::new()), Instant::now());
    let is_well = async || {
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
        *last.lock() = busy.join("; ");
        busy.is_empty()
    };
    let promise = Promise { acting: None, nodes: &[], since, max: QUIET_MAX };
    let took = kept(judge, promise, is_well, || format!("quiet after the last request: {}", last.lock())).await;
    took.unwrap_or_default()
}
