//! What must hold after a repair, and when nothing runs.

use super::judge::{Acting, Judge};
use super::load::Load;
use super::stage::{Node, Stage};
use crate::quiet::QUIET_MAX;
use crate::scrape::Scrape;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// The promise: so long after a repair each pair of workers hands KV over again.
const PAIRS_MAX: Duration = Duration::from_secs(5);
/// Pairs that carry nothing for so long get room.
const HURRY_AFTER: Duration = Duration::from_secs(1);
/// The promise: so long after a peer's resume, death or fenced reconnect nothing of it is quarantined.
const QUARANTINE_MAX: Duration = Duration::from_secs(1);
/// Longest wait for the numbers of a process that is well.
const SCRAPE_MAX: Duration = Duration::from_secs(2);
/// Looks are so far apart.
const LOOK: Duration = Duration::from_millis(25);

/// How long what was repaired took to be as before.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settled {
    /// Until the last pair carried a handoff.
    pub pairs: Duration,
    /// Until nothing was quarantined.
    pub quarantine: Duration,
}

/// Waits until all is as before `acting`, which was repaired at `since`, and tells the judge what is not in time.
pub async fn settle(stage: &Stage, load: &Load, judge: &Judge, acting: &Acting, since: Instant) -> Settled {
    let (pairs, quarantine) =
        tokio::join!(pairs(stage, load, judge, acting, since), quarantine(stage, judge, acting, since));
    Settled { pairs, quarantine }
}

/// Handoffs that each decode worker adopted from each prefill worker, over their present connections.
async fn adopted(stage: &Stage) -> BTreeMap<(Node, Node), f64> {
    let mut counts = BTreeMap::new();
    for decode in Node::DECODE {
        let Some(scrape) = scrape(stage, decode).await else { continue };
        for prefill in Node::PREFILL {
            let peer = format!("peer=\"{prefill}\"");
            let labels = [&peer, "direction=\"received\"", "outcome=\"adopted\""];
            counts.insert((prefill, decode), scrape.sum("baton_kv_peer_handoffs_total", &labels));
        }
    }
    counts
}

async fn scrape(stage: &Stage, node: Node) -> Option<Scrape> {
    timeout(SCRAPE_MAX, Scrape::of(&stage.metrics(node))).await.ok()?.ok()
}

/// Each pair, but those that another fault touches, carries a handoff within [`PAIRS_MAX`].
async fn pairs(stage: &Stage, load: &Load, judge: &Judge, acting: &Acting, since: Instant) -> Duration {
    let before = adopted(stage).await;
    let mut left: Vec<(Node, Node)> =
        Node::PREFILL.into_iter().flat_map(|prefill| Node::DECODE.map(|decode| (prefill, decode))).collect();
    let mut probing = load.probing();
    loop {
        let after = adopted(stage).await;
        left.retain(|pair| {
            let count = after.get(pair).copied().unwrap_or_default();
            // A new connection counts from 0.
            let carried = count > 0.0 && before.get(pair) != Some(&count);
            let excused = [pair.0, pair.1].into_iter().any(|node| judge.touched_since(since, node, acting));
            !carried && !excused
        });
        let passed = since.elapsed();
        if left.is_empty() {
            return passed;
        }
        if passed > PAIRS_MAX {
            let pairs: Vec<String> = left.iter().map(|(p, d)| format!("{p} and {d}")).collect();
            let what = format!("no handoff in {PAIRS_MAX:?} between {}; {}", pairs.join(", "), rates(stage).await);
            judge.breach((since, Instant::now()), what);
            return passed;
        }
        if passed > HURRY_AFTER {
            probing.hurry();
        }
        sleep(LOOK).await;
    }
}

/// What routers choose prefill workers by.
async fn rates(stage: &Stage) -> String {
    let mut rates = Vec::new();
    for node in Node::PREFILL {
        let rate = scrape(stage, node).await.map(|s| s.sum("baton_prefill_tokens_per_second", &[]));
        rates.push(format!("{node} prefills {:.0} tokens/s", rate.unwrap_or_default()));
    }
    rates.join(", ")
}

/// Nothing is quarantined on workers that no other fault touches, at some moment within [`QUARANTINE_MAX`].
async fn quarantine(stage: &Stage, judge: &Judge, acting: &Acting, since: Instant) -> Duration {
    let mut left: Vec<Node> = Node::PREFILL.into_iter().chain(Node::DECODE).collect();
    loop {
        let mut still = Vec::new();
        for node in left {
            if judge.touched_since(since, node, acting) {
                continue;
            }
            let blocks = scrape(stage, node).await.map_or(0.0, |s| s.sum("baton_kv_blocks", &["quarantined"]));
            if blocks > 0.0 {
                still.push((node, blocks));
            }
        }
        let passed = since.elapsed();
        if still.is_empty() {
            return passed;
        }
        if passed > QUARANTINE_MAX {
            judge.breach((since, Instant::now()), format!("blocks quarantined after {QUARANTINE_MAX:?}: {still:?}"));
            return passed;
        }
        left = still.into_iter().map(|(node, _)| node).collect();
        sleep(LOOK).await;
    }
}

/// Nobody asks and nothing is broken: within [`QUIET_MAX`] no worker references or quarantines a block, and routers hold no request.
pub async fn quiet(stage: &Stage, judge: &Judge) -> Duration {
    let since = Instant::now();
    loop {
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
        let passed = since.elapsed();
        if busy.is_empty() {
            return passed;
        }
        if passed > QUIET_MAX {
            judge.breach((since, Instant::now()), format!("{QUIET_MAX:?} after the last request: {}", busy.join("; ")));
            return passed;
        }
        sleep(LOOK).await;
    }
}
