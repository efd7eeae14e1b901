//! Checks of what must hold after a repair, and when nothing runs.

use super::faults::serves;
use super::judge::{Acting, Judge};
use super::lanes::Scene;
use super::stage::{Node, Stage};
use crate::quiet::QUIET_MAX;
use crate::scrape::Scrape;
use anyhow::Context as _;
use futures::future::join_all;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::{sleep, sleep_until, timeout};

/// The promise: within this time after a repair, each pair of workers completes a handoff again, and routers place on both.
const PAIRS_MAX: Duration = Duration::from_secs(5);
/// The promise: within this time after a peer's resume, death or fenced reconnect, none of its blocks is quarantined.
const QUARANTINE_MAX: Duration = Duration::from_secs(1);
/// Longest wait for the metrics of a healthy process.
const SCRAPE_MAX: Duration = Duration::from_secs(10);
/// Interval of the checks.
const LOOK: Duration = Duration::from_millis(25);

/// How long a recovery took: the longest time of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settled {
    /// Pairs that completed a handoff before another fault touched them.
    pub pairs: u64,
    /// Until each of them did.
    pub carried: Duration,
    /// Until routers placed on all workers.
    pub admitted: Duration,
    /// Until no block was quarantined.
    pub quarantine: Duration,
    /// Until a restarted worker was ready: its other times begin there.
    pub started: Duration,
}

impl Settled {
    fn and(self, other: Self) -> Self {
        Self {
            pairs: self.pairs + other.pairs,
            carried: self.carried.max(other.carried),
            admitted: self.admitted.max(other.admitted),
            quarantine: self.quarantine.max(other.quarantine),
            started: self.started.max(other.started),
        }
    }
}

/// Waits until the effects of `acting` are gone, whose repair took effect at `since`, and reports to the judge what is late. A
/// `restarted` worker loads its model first: promises that need it count from when it is ready, all others from the repair.
pub async fn settle(
    scene: Scene<'_>,
    acting: &Acting,
    since: Instant,
    restarted: Option<Node>,
) -> anyhow::Result<Settled> {
    let (own, others): (Vec<Node>, Vec<Node>) =
        Node::WORKERS.into_iter().partition(|worker| Some(*worker) == restarted);
    let (with, without): (Vec<Pair>, Vec<Pair>) = all_pairs().partition(|pair| pair.iter().any(|n| own.contains(n)));
    let is_worker = !own.is_empty();
    let at_once = async {
        let from = Since { repaired: since, counts: since };
        let admitted = admitted(scene, acting, from, &others);
        let (pairs, admitted, quarantine) = tokio::join!(
            pairs(scene, Some(acting), from, without),
            admitted,
            quarantine(scene, acting, since, others.clone())
        );
        Settled { admitted, quarantine, ..pairs }
    };
    let once_ready = async {
        let Some(node) = restarted else { return anyhow::Ok(Settled::default()) };
        serves(scene.stage, node).await?;
        if !is_worker {
            return Ok(Settled::default());
        }
        let from = Since { repaired: since, counts: Instant::now() };
        let (pairs, admitted, quarantine) = tokio::join!(
            pairs(scene, Some(acting), from, with),
            admitted(scene, acting, from, &Node::WORKERS),
            quarantine(scene, acting, from.counts, own)
        );
        Ok(Settled { admitted, quarantine, started: from.counts - since, ..pairs })
    };
    let (at_once, once_ready) = tokio::join!(at_once, once_ready);
    Ok(at_once.and(once_ready?))
}

/// The metrics that `read` takes from a process, which must have them.
async fn told<T>(stage: &Stage, node: Node, read: impl FnOnce(&Scrape) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let scrape = timeout(SCRAPE_MAX, Scrape::of(&stage.metrics(node))).await;
    read(&scrape.with_context(|| format!("{node} does not answer"))??)
}

/// The times from which a promise counts.
#[derive(Clone, Copy, Debug)]
struct Since {
    /// Other faults since then are an excuse.
    repaired: Instant,
    /// The bound begins here.
    counts: Instant,
}

/// A condition that must hold again, unless another fault touches one of `nodes` first.
struct Promise<'a> {
    acting: Option<&'a Acting>,
    nodes: &'a [Node],
    from: Since,
    max: Duration,
}

/// Polls until the condition holds, and returns how long that took; `None` if another fault came first. Reports to the judge what is
/// late, as described by `amiss`.
async fn kept(
    judge: &Judge,
    Promise { acting, nodes, from, max }: Promise<'_>,
    mut is_well: impl AsyncFnMut() -> bool,
    amiss: impl Fn() -> String,
) -> Option<Duration> {
    let (Since { repaired, counts }, max) = (from, judge.allows(max));
    let other = async {
        while !nodes.iter().any(|node| judge.touched_since(repaired, *node, acting)) {
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
        () = well => counts.elapsed(),
        () = sleep_until((counts + max).into()) => counts.elapsed().max(max + LOOK),
    };
    if took > max {
        judge.breach((repaired, Instant::now()), format!("not in {max:?}: {}", amiss()));
    }
    Some(took)
}

/// A prefill and a decode worker.
type Pair = [Node; 2];

fn all_pairs() -> impl Iterator<Item = Pair> {
    Node::PREFILL.into_iter().flat_map(|prefill| Node::DECODE.map(|decode| [prefill, decode]))
}

/// Every pair that no fault touches completes a handoff within `PAIRS_MAX` from now.
pub async fn whole(scene: Scene<'_>) -> Settled {
    let now = Instant::now();
    pairs(scene, None, Since { repaired: now, counts: now }, all_pairs().collect()).await
}

/// Each of `pairs` that no other fault touches completes a handoff within [`PAIRS_MAX`].
async fn pairs(scene: Scene<'_>, acting: Option<&Acting>, from: Since, pairs: Vec<Pair>) -> Settled {
    let took = join_all(pairs.into_iter().map(|pair| carries(scene, acting, from, pair))).await;
    let pairs = took.iter().flatten().count() as u64;
    Settled { pairs, carried: longest(took), ..Settled::default() }
}

async fn carries(scene: Scene<'_>, acting: Option<&Acting>, from: Since, [prefill, decode]: Pair) -> Option<Duration> {
    let Scene { stage, handoffs, judge, .. } = scene;
    let (at, last) = (Mutex::new("begins"), Mutex::new("none failed".to_owned()));
    let is_well = async || match handoffs.one(stage, (prefill, decode), |now| *at.lock() = now).await {
        Ok(None) => true,
        Ok(Some(wrong)) => {
            let what = format!("a handoff from {prefill} to {decode} is wrong: {wrong}");
            judge.breach((from.repaired, Instant::now()), what);
            true
        }
        Err(why) => {
            *last.lock() = format!("{why:#}");
            false
        }
    };
    let amiss = || format!("a handoff from {prefill} to {decode}: one {}, and before it: {}", at.lock(), last.lock());
    kept(judge, Promise { acting, nodes: &[prefill, decode], from, max: PAIRS_MAX }, is_well, amiss).await
}

/// Within [`PAIRS_MAX`], routers place on all of `workers`; routers and workers that another fault touches are left out.
async fn admitted(scene: Scene<'_>, acting: &Acting, from: Since, workers: &[Node]) -> Duration {
    let Scene { stage, judge, .. } = scene;
    let one = async |router| {
        let missing = Mutex::new(String::new());
        let is_well = async || {
            let ready = |s: &Scrape, role| anyhow::Ok(s.find("baton_router_ready_workers", &[role])? as usize);
            let ready = told(stage, router, |s| Ok([ready(s, "prefill")?, ready(s, "decode")?])).await;
            let all = [Node::PREFILL, Node::DECODE].map(|of_role| {
                let untouched = |worker: &Node| !judge.touched_since(from.repaired, *worker, Some(acting));
                of_role.into_iter().filter(|worker| workers.contains(worker) && untouched(worker)).count()
            });
            *missing.lock() = format!("{router} places on {ready:?} prefill and decode workers of {all:?}");
            ready.is_ok_and(|ready| ready[0] >= all[0] && ready[1] >= all[1])
        };
        let promise = Promise { acting: Some(acting), nodes: &[router], from, max: PAIRS_MAX };
        kept(judge, promise, is_well, || missing.lock().clone()).await
    };
    longest(join_all(Node::ROUTERS.map(one)).await)
}

/// At some moment within a second, none of these workers has quarantined blocks; workers that another fault touches are left out.
pub async fn quarantine(scene: Scene<'_>, acting: &Acting, since: Instant, workers: Vec<Node>) -> Duration {
    let Scene { stage, judge, .. } = scene;
    let one = async |worker| {
        let left = Mutex::new("not asked".to_owned());
        let is_well = async || {
            let blocks = told(stage, worker, |s| s.find("baton_kv_blocks", &["quarantined"])).await;
            *left.lock() = format!("{blocks:?}");
            blocks.is_ok_and(|blocks| blocks == 0.0)
        };
        let promise = Promise {
            acting: Some(acting),
            nodes: &[worker],
            from: Since { repaired: since, counts: since },
            max: QUARANTINE_MAX,
        };
        kept(judge, promise, is_well, || format!("nothing quarantined at {worker}: {}", left.lock())).await
    };
    longest(join_all(workers.into_iter().map(one)).await)
}

fn longest(times: impl IntoIterator<Item = Option<Duration>>) -> Duration {
    times.into_iter().flatten().max().unwrap_or_default()
}

/// No client sends requests and nothing is broken: within [`QUIET_MAX`] workers are idle with all their initial blocks, and routers hold
/// no request.
pub async fn quiet(stage: &Stage, judge: &Judge) -> Duration {
    let last = Mutex::new(Vec::new());
    let now = Instant::now();
    let is_well = async || {
        let mut busy = Vec::new();
        for (worker, blocks) in stage.blocks() {
            let left = match timeout(SCRAPE_MAX, stage.counts(worker)).await {
                Ok(Ok(counts)) if counts.blocks() == blocks => counts.left(|_| true),
                Ok(Ok(counts)) => vec![format!("it began with {blocks} blocks, and has {counts:?}")],
                Ok(Err(why)) => vec![format!("{why:#}")],
                Err(_) => vec!["no answer".to_owned()],
            };
            busy.extend(left.into_iter().map(|left| format!("{worker}: {left}")));
        }
        for router in Node::ROUTERS {
            match told(stage, router, in_flight).await {
                Ok(0.0) => {}
                now => busy.push(format!("{router}: {now:?} requests in flight")),
            }
        }
        let is_quiet = busy.is_empty();
        *last.lock() = busy;
        is_quiet
    };
    let promise = Promise { acting: None, nodes: &[], from: Since { repaired: now, counts: now }, max: QUIET_MAX };
    let took =
        kept(judge, promise, is_well, || format!("quiet after the last request: {}", last.lock().join("; "))).await;
    took.unwrap_or_default()
}

/// How often pools were full. Counts of a killed process since the last scrape are lost.
#[derive(Debug, Default)]
pub struct Full {
    /// Sequences that were preempted.
    pub preemptions: u64,
    seen: BTreeMap<Node, u64>,
}

impl Full {
    /// Adds the counts of all processes since the last scrape, or since their start.
    pub async fn look(&mut self, stage: &Stage) -> anyhow::Result<()> {
        for worker in Node::WORKERS {
            let now = told(stage, worker, |s| s.find("baton_preemptions_total", &[])).await? as u64;
            let before = self.seen.insert(worker, now).filter(|before| *before <= now);
            self.preemptions += now - before.unwrap_or_default();
        }
        Ok(())
    }
}

/// Requests that a router runs. The series may be absent if it has answered none since its start.
fn in_flight(router: &Scrape) -> anyhow::Result<f64> {
    const NAME: &str = "baton_router_requests_in_flight";
    router.find("baton_router_registered_workers", &[])?;
    let answered = router.sum("baton_router_requests_total", &["outcome=\"ok\""]);
    if answered > 0.0 { router.find(NAME, &[]) } else { Ok(router.sum(NAME, &[])) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether anything was found, and the number of broken promises by then.
    async fn check(judge: &Judge, max: Duration, well: bool) -> (bool, usize) {
        check_from(judge, max, well, Duration::from_secs(1)).await
    }

    /// The same for a repair a second ago, with counts since `counts` ago.
    async fn check_from(judge: &Judge, max: Duration, well: bool, counts: Duration) -> (bool, usize) {
        let now = Instant::now();
        let from = Since { repaired: now - Duration::from_secs(1), counts: now - counts };
        let promise = Promise { acting: None, nodes: &[Node::Decode(0)], from, max };
        let took = kept(judge, promise, async || well, || "amiss".into()).await;
        (took.is_some(), judge.breaches().len())
    }

    #[tokio::test]
    async fn what_is_well_too_late_is_a_breach_and_another_fault_excuses_it() {
        let judge = Judge::new(Instant::now() - Duration::from_secs(10));
        let (short, long) = (Duration::from_millis(500), Duration::from_secs(100));
        assert_eq!(check(&judge, long, true).await, (true, 0));
        assert_eq!(check(&judge, short, true).await, (true, 1), "it is well after a second, not after half of one");
        assert_eq!(check(&judge, short, false).await, (true, 2), "it is not well at all");
        assert_eq!(check_from(&judge, short, true, Duration::ZERO).await, (true, 2), "its time begins later");
        assert_eq!(check_from(&judge, short, false, Duration::ZERO).await, (true, 3));
        judge.begin_fault("d-0 killed".into(), vec![Node::Decode(0)]);
        assert_eq!(check(&judge, short, false).await, (false, 3));
        let patient = Judge::new(Instant::now() - Duration::from_secs(10)).with_patience(100);
        assert_eq!(check(&patient, short, true).await, (true, 0), "a second is not long for it");
    }
}
