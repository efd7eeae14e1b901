//! The schedule: seeded, and the emptiest cells first. Two lanes strike side by side, so that faults of workers meet faults of what is
//! around them.

use super::checks::{self, Settled};
use super::faults::{Target, duration, repair, strike};
use super::handoffs::Handoffs;
use super::judge::Judge;
use super::load::Load;
use super::matrix::{Cell, Component, Fault, Phase, cells};
use super::sight;
use super::stage::Stage;
use parking_lot::Mutex;
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom as _;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Parts that one lane breaks, one at a time.
pub const LANES: [&[Component]; 2] = [
    &[Component::Prefill, Component::Decode, Component::Control],
    &[Component::Router, Component::Etcd, Component::Registry, Component::Data],
];
/// Longest wait for a request in the phase that is wanted.
const PHASE_MAX: Duration = Duration::from_secs(3);
/// So many tries at a cell stand for a hit, when the next one is chosen.
const TRIES: u64 = 3;
/// Looks for it are so far apart.
const LOOK: Duration = Duration::from_millis(5);
/// Rest between two faults of a lane.
const REST_MS: u64 = 300;

/// What faults did so far.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Hits by cell: requests were in that phase there.
    pub hits: BTreeMap<Cell, u64>,
    /// How often a cell was the one wanted.
    tries: BTreeMap<Cell, u64>,
    /// Strikes.
    pub faults: u64,
    /// Handoffs that pairs carried right after a repair.
    pub pairs: u64,
    /// Longest time until all pairs carried handoffs again.
    pub pairs_max: Duration,
    /// Longest time until routers placed on all workers again.
    pub admitted_max: Duration,
    /// Longest time until nothing was quarantined.
    pub quarantine_max: Duration,
}

/// Everything that a lane acts on.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    /// The cluster.
    pub stage: &'a Stage,
    /// Its clients.
    pub load: &'a Load,
    /// Who asks each pair of workers for a handoff.
    pub handoffs: &'a Handoffs,
    /// Who listens.
    pub judge: &'a Judge,
    /// What is counted.
    pub record: &'a Mutex<Record>,
}

/// Strikes `components` one after the other until then.
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

/// A cell with the fewest hits among those that can be hit here; one that is often missed lets others come first.
fn emptiest(scene: Scene<'_>, components: &[Component], random: &mut StdRng) -> Option<Cell> {
    let mut record = scene.record.lock();
    let of = |counts: &BTreeMap<Cell, u64>, cell: &Cell| counts.get(cell).copied().unwrap_or_default();
    let rank = |record: &Record, cell: &Cell| of(&record.hits, cell) + of(&record.tries, cell) / TRIES;
    let possible = |cell: &Cell| components.contains(&cell.0) && (scene.stage.network().is_some() || !cell.0.is_link());
    let fewest = cells().filter(possible).map(|cell| rank(&record, &cell)).min()?;
    let chosen = cells().filter(possible).filter(|cell| rank(&record, cell) == fewest).choose(random)?;
    *record.tries.entry(chosen).or_default() += 1;
    Some(chosen)
}

/// One part in which a request is in the wanted phase, and the phases of all that it has; any part if there is none for long.
async fn find(scene: Scene<'_>, cell: Cell, random: &mut StdRng) -> (Target, BTreeSet<Phase>) {
    let deadline = Instant::now() + PHASE_MAX;
    loop {
        let target = Target::draw(cell.0, random);
        let met = sight::phases(target, scene.stage, scene.load).await;
        if met.contains(&cell.2) || Instant::now() > deadline {
            return (target, met);
        }
        sleep(LOOK).await;
    }
}

async fn one(scene: Scene<'_>, cell: Cell, random: &mut StdRng) -> anyhow::Result<()> {
    let Scene { stage, judge, record, .. } = scene;
    let (target, met) = find(scene, cell, random).await;
    let Cell(component, fault, _) = cell;
    let at_s = judge.at_s();
    let acting = judge.strikes(format!("{target} {fault}"), target.nodes());
    strike(stage, target, fault).await?;
    count(record, component, fault, &met);
    sleep(duration(fault, random)).await;
    repair(stage, target, fault).await?;
    let since = Instant::now();
    let back_s = judge.at_s() - at_s;
    let Settled { pairs, admitted, quarantine } = checks::settle(scene, &acting, since).await;
    judge.settled(&acting);
    let last = pairs.iter().max().copied().unwrap_or_default();
    {
        let mut record = record.lock();
        record.pairs += pairs.len() as u64;
        record.pairs_max = record.pairs_max.max(last);
        record.admitted_max = record.admitted_max.max(admitted);
        record.quarantine_max = record.quarantine_max.max(quarantine);
    }
    let met: Vec<String> = met.iter().map(ToString::to_string).collect();
    println!(
        "{at_s:>7.1} s  {target} {fault}, met {}; back after {back_s:.1} s, {} pairs in {:.1} s, admitted in {:.1} s, \
         no quarantine in {:.2} s",
        met.join(", "),
        pairs.len(),
        last.as_secs_f64(),
        admitted.as_secs_f64(),
        quarantine.as_secs_f64()
    );
    Ok(())
}

fn count(record: &Mutex<Record>, component: Component, fault: Fault, met: &BTreeSet<Phase>) {
    let mut record = record.lock();
    record.faults += 1;
    for cell in cells().filter(|Cell(c, f, phase)| *c == component && *f == fault && met.contains(phase)) {
        *record.hits.entry(cell).or_default() += 1;
    }
}
