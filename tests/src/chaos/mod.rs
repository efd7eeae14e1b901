//! Fault injection: a whole cluster, with each process on its own host, is broken in every way of [`matrix`]. Meanwhile clients of every
//! kind send requests whose answers are known.
//!
//! ```text
//! lanes ── emptiest cell ──> sight: is a request in that phase there? ──> faults: inject, wait, repair ──> checks
//!   │                                                                                                        │
//!   └──────────── load: clients, every token compared ─────────────> judge <─────────────────────────────────┘
//! ```
//!
//! The judge decides which requests had to succeed from the injected faults, not from what the cluster reports. [`report`] summarizes the
//! results.

pub mod checks;
mod client;
pub mod faults;
pub mod handoffs;
pub mod hostile;
pub mod judge;
pub mod lanes;
pub mod load;
pub mod matrix;
pub mod network;
pub mod relay;
pub mod report;
pub mod sight;
pub mod stage;

use crate::load::Case;
use handoffs::Handoffs;
use hostile::Hostile;
use judge::Judge;
use lanes::{LANES, Scene};
use load::Load;
use network::Network;
use parking_lot::Mutex;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use report::{Act, Outcome, Report};
use stage::{Node, Stage};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::RwLock;

/// Faults pause at this interval, to check that everything is released when there are no requests.
const ROUND: Duration = Duration::from_secs(110);
/// The same, while the run is extended for cells that lack hits.
const LONGER_ROUND: Duration = Duration::from_secs(20);

/// One model's part of a run.
#[derive(Clone, Debug)]
pub struct ActPlan {
    /// The workers' `--model`.
    pub model: String,
    /// The clients' requests.
    pub cases: Vec<Case>,
    /// Concurrent clients.
    pub clients: usize,
    /// The KV transport: `tcp`, or `ucx` over shared memory, whose messages and greetings use TCP.
    pub transport: &'static str,
    /// The workers' KV pool size: a small pool is sometimes full.
    pub kv_cache_bytes: &'static str,
    pub time: Duration,
}

/// The plan of a run, with its minimum results.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Seed of the random requests, faults and lost packets.
    pub seed: u64,
    /// Models, one after another.
    pub acts: Vec<ActPlan>,
    /// Minimum hits of each cell: the last model's part is extended until it is reached, by at most `longer_max`.
    pub hits_min: u64,
    /// See `hits_min`.
    pub longer_max: Duration,
    /// Whether links fail too.
    pub links: bool,
    /// Minimum number of requests that end.
    pub requests_min: u64,
    /// How many times longer than promised everything may take: 1 where the promises are measured, more on a machine that is busy otherwise.
    pub patience: u32,
    /// Folder of the logs.
    pub folder: PathBuf,
}

/// Runs the plan; `network` says why there can be no network of its own. An error means that the run itself failed.
pub async fn run(plan: &Plan, network: Result<(), String>) -> anyhow::Result<Report> {
    let start = Instant::now();
    let no_network = network.err();
    let network = match &no_network {
        None => {
            let hosts: Vec<String> = Node::ALL.iter().map(ToString::to_string).collect();
            Some(Arc::new(Network::start(&hosts, plan.seed).await?))
        }
        Some(_) => None,
    };
    let mut outcome = Outcome::default();
    for (number, act) in plan.acts.iter().enumerate() {
        let judge = Arc::new(Judge::new(start).with_patience(plan.patience));
        let logs = logs(&plan.folder, number);
        let seed = plan.seed ^ number as u64;
        let stage = Stage::start(act, network.clone(), &logs).await?;
        println!("{:>7.1} s  {} serves", judge.at_s(), act.model);
        let longer = (number + 1 == plan.acts.len()).then_some(plan);
        play(&stage, (act, longer), seed, &judge, &mut outcome).await?;
        for wrong in stage.end().await? {
            judge.breach((start, Instant::now()), wrong);
        }
        outcome.acts.push(Act { model: act.model.clone(), requests: judge.tally() });
        outcome.breaches.extend(judge.breaches());
    }
    Ok(Report::new(plan, no_network, outcome))
}

async fn play(
    stage: &Stage,
    (act, longer): (&ActPlan, Option<&Plan>),
    seed: u64,
    judge: &Arc<Judge>,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    let routers = Node::ROUTERS.map(|router| stage.grpc(router));
    let load = Load::start(&routers, &act.cases, act.clients, judge.clone(), seed).await?;
    let mut full = checks::Full::default();
    let record = Mutex::new(std::mem::take(&mut outcome.record));
    let handoffs = Handoffs::start(stage, load.shortest()).await;
    let hostile = Hostile::start(stage, load.shortest()[0].request(), seed).await?;
    let alone = RwLock::default();
    let scene = Scene { stage, load: &load, handoffs: &handoffs, judge, alone: &alone, record: &record };
    let mut random = [1, 2].map(|lane| StdRng::seed_from_u64(seed.wrapping_mul(31).wrapping_add(lane)));
    let end = Instant::now() + act.time;
    loop {
        let now = Instant::now();
        let lacks = |plan: &&Plan| !record.lock().lacking(plan.hits_min, stage.network().is_some()).is_empty();
        let longest = end + longer.filter(lacks).map_or(Duration::ZERO, |plan| plan.longer_max);
        if now >= longest {
            break;
        }
        let until = if now < end { end.min(now + ROUND) } else { longest.min(now + LONGER_ROUND) };
        let [workers, around] = &mut random;
        tokio::try_join!(lanes::run(scene, LANES[0], until, workers), lanes::run(scene, LANES[1], until, around),)?;
        lanes::whole(scene).await;
        load.pause().await;
        let quiet = checks::quiet(stage, judge).await;
        outcome.quiet_max = outcome.quiet_max.max(quiet);
        hostile.look(stage).await;
        full.look(stage).await?;
        let tally = judge.tally();
        println!("{:>7.1} s  quiet after {:.2} s; {tally:?}", judge.at_s(), quiet.as_secs_f64());
        load.resume();
    }
    load.stop().await?;
    outcome.attacks += hostile.said();
    outcome.preemptions += full.preemptions;
    outcome.longer = end.elapsed();
    outcome.record = record.into_inner();
    Ok(())
}

/// Folder of the logs of one act.
fn logs(folder: &Path, act: usize) -> PathBuf {
    folder.join(format!("logs-{act}"))
}
