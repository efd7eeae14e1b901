//! The schedule of faults: seeded, and the cells with the fewest hits first. Two lanes inject faults concurrently, so that faults of
//! workers coincide with faults of the parts around them.

use super::checks::{self, Settled};
use super::faults::{PATIENCE, Target, duration, inject, repair, restarts};
use super::handoffs::Handoffs;
use super::judge::Judge;
use super::load::Load;
use super::matrix::{Cell, Component, Fault, Phase, cells, possible};
use super::sight;
use super::stage::{Node, Stage};
use parking_lot::Mutex;
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom as _;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tokio::sync::RwLock;
use tokio::time::sleep;

/// Components of each lane; a lane breaks one at a time.
pub const LANES: [&[Component]; 2] = [
    &[Component::Prefill, Component::Decode, Component::Control],
    &[Component::Router, Component::Etcd, Component::Registry, Component::RouterRegistry, Component::Data],
];
/// Longest wait for a request in the wanted phase.
const PHASE_MAX: Duration = Duration::from_secs(3);
/// This many tries at a cell count as one hit when the next cell is chosen.
const TRIES: u64 = 3;
/// Interval of the checks for such a request.
const LOOK: Duration = Duration::from_millis(5);
/// Share of faults injected while the other lane pauses, so that no other fault excuses their effects.
const ALONE_SHARE: f64 = 0.1;
/// Pause of a lane between two faults.
const REST_MS: u64 = 300;

/// Pairs of a prefill and a decode worker.
pub const PAIRS: u64 = (Node::PREFILL.len() * Node::DECODE.len()) as u64;

/// The results of the faults so far.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Hits by cell: requests were in that phase at the component.
    pub hits: BTreeMap<Cell, u64>,
    /// How often each cell was chosen.
    tries: BTreeMap<Cell, u64>,
    /// Injected faults.
    pub faults: u64,
    /// Of these, faults that lasted longer than the data plane waits for a silent peer.
    pub longest: u64,
    /// Handoffs that pairs completed right after a repair.
    pub pairs: u64,
    /// Repairs after which every pair completed a handoff.
    pub all_pairs: u64,
    /// Repairs followed by another fault before all pairs had completed one.
    pub met: u64,
    /// Of those, repairs since all pairs were last tested.
    owed: u64,
    /// How often all pairs were tested while nothing was broken, because some tests had been interrupted.
    pub whole: u64,
    /// Longest time until all pairs completed handoffs again.
    pub pairs_max: Duration,
    /// Longest time until a restarted worker was ready.
    pub started_max: Duration,
    /// Longest time until routers placed on all workers again.
    pub admitted_max: Duration,
    /// Longest time until no block was quarantined.
    pub quarantine_max: Duration,
}

impl Record {
    /// Cells with fewer hits than `hits_min`, and their hits; cells of links only if there are `links`.
    pub fn lacking(&self, hits_min: u64, links: bool) -> Vec<(Cell, u64)> {
        possible(links).map(|cell| (cell, self.hits_of(cell))).filter(|(_, hits)| *hits < hits_min).collect()
    }

    /// How often a cell was hit.
    pub fn hits_of(&self, cell: Cell) -> u64 {
        self.hits.get(&cell).copied().unwrap_or_default()
    }
}

/// Everything that a lane uses.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    /// The cluster.
    pub stage: &'a Stage,
    /// Its clients.
    pub load: &'a Load,
    /// Requests handoffs between each pair of workers.
    pub handoffs: &'a Handoffs,
    /// Receives the events.
    pub judge: &'a Judge,
    /// Read lock for a fault; write lock for a fault that must be the only one.
    pub alone: &'a RwLock<()>,
    /// What is counted.
    pub record: &'a Mutex<Record>,
}

/// Injects faults into `components`, one at a time, until then.
pub async fn run(
    scene: Scene<'_>,
    components: &[Component],
    until: Instant,
    random: &mut StdRng,
) -> anyhow::Result<()> {
    while Instant::now() < until {
        let Some(cell) = emptiest(scene, components, random) else { return Ok(()) };
        one(scene, cell, random).await?;
        sleep(Duration::from_millis(random.random_range(0..REST_MS))).await;
    }
    Ok(())
}

/// One of the cells with the fewest hits that can be hit here. Tries count as well, so a cell that is often missed does not block others.
fn emptiest(scene: Scene<'_>, components: &[Component], random: &mut StdRng) -> Option<Cell> {
    let mut record = scene.record.lock();
    let of = |counts: &BTreeMap<Cell, u64>, cell: &Cell| counts.get(cell).copied().unwrap_or_default();
    let rank = |record: &Record, cell: &Cell| of(&record.hits, cell) + of(&record.tries, cell) / TRIES;
    let ours = || possible(scene.stage.network().is_some()).filter(|cell| components.contains(&cell.0));
    let fewest = ours().map(|cell| rank(&record, &cell)).min()?;
    let chosen = ours().filter(|cell| rank(&record, cell) == fewest).choose(random)?;
    *record.tries.entry(chosen).or_default() += 1;
    Some(chosen)
}

/// A target with a request in the wanted phase, and the phases of all its requests. Any target if there is no such request in time.
async fn find(scene: Scene<'_>, cell: Cell, random: &mut StdRng) -> (Target, BTreeSet<Phase>) {
    let deadline = Instant::now() + PHASE_MAX;
    loop {
        let target = Target::draw(cell.0, cell.1, random);
        let met = sight::phases(target, scene.stage, scene.load).await;
        if met.contains(&cell.2) || Instant::now() > deadline {
            return (target, met);
        }
        sleep(LOOK).await;
    }
}

async fn one(scene: Scene<'_>, cell: Cell, random: &mut StdRng) -> anyhow::Result<()> {
    let Scene { stage, judge, record, alone, .. } = scene;
    let is_alone = random.random_bool(ALONE_SHARE) || cell.1.is_alone();
    let _alone = if is_alone { Some(alone.write().await) } else { None };
    let _beside = if is_alone { None } else { Some(alone.read().await) };
    if is_alone {
        whole(scene).await;
    }
    let (target, met) = find(scene, cell, random).await;
    let Cell(component, fault, _) = cell;
    let at_s = judge.at_s();
    let acting = judge.begin_fault(format!("{target} {fault}"), target.nodes());
    let lasts = duration(fault, random);
    inject(stage, target, fault).await?;
    let struck = Instant::now();
    count(record, component, fault, &met);
    record.lock().longest += u64::from(lasts > PATIENCE);
    let repaired = async {
        sleep(lasts).await;
        repair(stage, target, fault).await
    };
    // Processes that had connections with it notice its death at once, long before its next start.
    let bereaved = async {
        let others = Node::WORKERS.into_iter().filter(|worker| !target.nodes().contains(worker)).collect();
        if fault == Fault::Killed { checks::quarantine(scene, &acting, struck, others).await } else { Duration::ZERO }
    };
    let (repaired, bereaved) = tokio::join!(repaired, bereaved);
    let since = repaired?;
    let back_s = judge.at_s() - at_s;
    let settled = checks::settle(scene, &acting, since, restarts(target, fault)).await?;
    let quarantine = settled.quarantine.max(bereaved);
    judge.settled(&acting);
    {
        let mut record = record.lock();
        record.pairs += settled.pairs;
        let is_whole = settled.pairs == PAIRS;
        record.all_pairs += u64::from(is_whole);
        record.met += u64::from(!is_whole);
        record.owed += u64::from(!is_whole);
        record.pairs_max = record.pairs_max.max(settled.carried);
        record.started_max = record.started_max.max(settled.started);
        record.admitted_max = record.admitted_max.max(settled.admitted);
        record.quarantine_max = record.quarantine_max.max(quarantine);
    }
    let met: Vec<String> = met.iter().map(ToString::to_string).collect();
    println!(
        "{at_s:>7.1} s  {target} {fault}, met {}; repaired after {back_s:.1} s, {} pairs in {:.1} s, admitted in {:.1} s, \
         no quarantine in {:.2} s",
        met.join(", "),
        settled.pairs,
        settled.carried.as_secs_f64(),
        settled.admitted.as_secs_f64(),
        quarantine.as_secs_f64()
    );
    Ok(())
}

/// Tests all pairs at a moment when nothing is broken, if other faults interrupted tests before.
pub async fn whole(scene: Scene<'_>) {
    let owed = std::mem::take(&mut scene.record.lock().owed);
    if owed == 0 {
        return;
    }
    let Settled { pairs, carried, .. } = checks::whole(scene).await;
    let mut record = scene.record.lock();
    record.whole += 1;
    record.pairs_max = record.pairs_max.max(carried);
    println!(
        "{:>7.1} s  nothing is broken: {} pairs in {:.1} s, {owed} repairs after they were asked last",
        scene.judge.at_s(),
        pairs,
        carried.as_secs_f64()
    );
}

fn count(record: &Mutex<Record>, component: Component, fault: Fault, met: &BTreeSet<Phase>) {
    let mut record = record.lock();
    record.faults += 1;
    for cell in cells().filter(|Cell(c, f, phase)| *c == component && *f == fault && met.contains(phase)) {
        *record.hits.entry(cell).or_default() += 1;
    }
}
