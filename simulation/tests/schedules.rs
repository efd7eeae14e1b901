//! Seeded schedules of a whole cluster: see `baton_simulation`.

use baton_simulation::{Broken, Counts, Invariant, Ran, run, run_with_states};
use baton_types::defect::{self, Defect};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What many schedules left.
#[derive(Default)]
struct Sum {
    schedules: u64,
    events: u64,
    fewest: u64,
    counts: Counts,
}

impl Sum {
    fn add(&mut self, ran: &Ran) {
        self.fewest = if self.schedules == 0 { ran.events } else { self.fewest.min(ran.events) };
        self.schedules += 1;
        self.events += ran.events;
        self.counts.merge(&ran.counts);
    }

    fn join(mut self, other: Self) -> Self {
        let none = self.schedules == 0;
        self.fewest = if none { other.fewest } else { self.fewest.min(other.fewest) };
        self.schedules += other.schedules;
        self.events += other.events;
        self.counts.merge(&other.counts);
        self
    }
}

/// Runs the schedules of these seeds, each on one of as many threads as there are cores, up to the first that breaks.
fn run_all(seeds: Range<u64>) -> Result<Sum, Broken> {
    run_all_by(run, seeds)
}

fn run_all_by(run: fn(u64) -> Result<Ran, Broken>, seeds: Range<u64>) -> Result<Sum, Broken> {
    let next = AtomicU64::new(seeds.start);
    let work = || {
        let mut sum = Sum::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return Ok(sum);
            }
            match run(seed) {
                Ok(ran) => sum.add(&ran),
                Err(broken) => {
                    next.store(seeds.end, Ordering::Relaxed);
                    return Err(broken);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let sums: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(|thread| thread.join().expect("it returns")).collect()
    });
    sums.into_iter().try_fold(Sum::default(), |all, sum| Ok(all.join(sum?)))
}

/// Small and fixed: part of every `make test`.
#[test]
fn a_fixed_set_of_schedules_breaks_nothing() {
    let sum = run_all(0..1_500).unwrap_or_else(|broken| panic!("{broken}"));
    assert!(sum.fewest >= 200, "a schedule has {} events only", sum.fewest);
    assert_eq!(sum.counts.rare(1), [""; 0], "never happened:\n{}", sum.counts);
}

/// The same of a model with states, which puts and gets move beside its KV.
#[test]
fn schedules_with_states_break_nothing() {
    let sum = run_all_by(run_with_states, 0..500).unwrap_or_else(|broken| panic!("{broken}"));
    assert!(sum.fewest >= 200, "a schedule has {} events only", sum.fewest);
}

/// The recorded run; `BATON_SIMULATION_SEEDS=7..8` runs one schedule again.
#[test]
#[ignore = "minutes; `make test-full` runs it"]
fn a_hundred_thousand_schedules_break_nothing() {
    let (sum, is_given) = recorded(run, 1_000_000..1_100_000, u64::MAX);
    if !is_given {
        assert!(sum.fewest >= 200);
        assert_eq!(sum.counts.rare(100), [""; 0]);
    }
}

/// The same of a model with states.
#[test]
#[ignore = "five minutes; `make test-full` runs it"]
fn ten_thousand_schedules_with_states_break_nothing() {
    let (sum, is_given) = recorded(run_with_states, 1_000_000..1_010_000, 10_000);
    assert!(is_given || sum.fewest >= 200);
}

/// Runs these schedules, or at most so many of those that are given, which is the second result.
fn recorded(run: fn(u64) -> Result<Ran, Broken>, seeds: Range<u64>, most: u64) -> (Sum, bool) {
    let given = std::env::var("BATON_SIMULATION_SEEDS").ok();
    let seeds = given.as_ref().map_or(seeds, |given| {
        let (from, to) = given.split_once("..").expect("BATON_SIMULATION_SEEDS is FROM..TO");
        from.parse().expect("a seed")..to.parse().expect("a seed")
    });
    let (seeds, began) = (seeds.start..seeds.end.min(seeds.start.saturating_add(most)), Instant::now());
    let sum = run_all_by(run, seeds).unwrap_or_else(|broken| panic!("{broken}"));
    let seconds = began.elapsed().as_secs_f64();
    println!("{} schedules, {} events, at least {} each, {seconds:.0} s", sum.schedules, sum.events, sum.fewest);
    println!("{}", sum.counts);
    (sum, given.is_some())
}

/// A failure can be replayed: a seed gives one schedule.
#[test]
fn a_seed_gives_one_schedule() {
    for seed in 0..50 {
        let [one, two] = [(); 2].map(|()| run(seed).unwrap_or_else(|broken| panic!("{broken}")));
        assert_eq!((one.events, one.digest), (two.events, two.digest), "seed {seed}");
    }
}

/// Each defect, with what it breaks, and how many schedules that takes at most. It may break something else first.
const DEFECTS: [(Defect, &[Invariant], u64); 20] = [
    (Defect::ReleaseWithoutFence, &[Invariant::WritesWithinGrants], 5_000),
    (Defect::OtherIncarnation, &[Invariant::RightIncarnation], 1_000),
    (Defect::OlderIncarnation, &[Invariant::RightIncarnation], 5_000),
    (Defect::DoubleFree, &[Invariant::OneOwner], 1_000),
    (Defect::ViewGoesBack, &[Invariant::ForwardViews], 1_000),
    (Defect::UnverifiedKv, &[Invariant::VerifiedKv], 1_000),
    (Defect::LateQuarantineBound, &[Invariant::QuarantineBound], 1_000),
    (Defect::NoStreamDeadline, &[Invariant::EveryEnd], 1_000),
    (Defect::PartialGrantOffByOne, &[Invariant::VerifiedKv], 1_000),
    (Defect::ForkShares, &[Invariant::RightAnswer, Invariant::Core], 1_000),
    (Defect::EvictedPin, &[Invariant::Core], 1_000),
    (Defect::IndexKeepsDeparted, &[Invariant::TrueIndex], 1_000),
    (Defect::ExpiredPinAdopted, &[Invariant::VerifiedKv], 5_000),
    (Defect::StarvingGrant, &[Invariant::FairShare], 2_000),
    (Defect::IgnoredShares, &[Invariant::FairShare], 1_000),
    (Defect::IgnoredWeights, &[Invariant::FairShare], 1_000),
    (Defect::GrantWithoutTime, &[Invariant::FairShare], 2_000),
    (Defect::GrantDespiteQuarantine, &[Invariant::QuarantineBound], 1_000),
    (Defect::ReplayAsPrompt, &[Invariant::RightAnswer], 1_000),
    (Defect::EndlessMoves, &[Invariant::BoundedCalls], 5_000),
];

/// Each defect that is seeded into shipped code is found, by the invariant that it breaks.
#[test]
fn seeded_defects_are_found() {
    for (defect, breaks, schedules) in DEFECTS {
        defect::seed(Some(defect));
        let mut broken = (0..schedules).filter_map(|seed| run(seed).err());
        let found = broken.find(|broken| breaks.contains(&broken.breach.invariant));
        defect::seed(None);
        let found = found.unwrap_or_else(|| panic!("{defect:?} breaks none of {breaks:?} in {schedules} schedules"));
        println!("{defect:?}: {found}");
    }
}
