//! Schedules under virtual time: see `baton_tests::simulation`.

use baton_tests::simulation::{Broken, Counts, Mutant, Ran, run};
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
}

/// Runs the schedules of these seeds on two threads, up to the first that breaks.
fn run_all(seeds: Range<u64>) -> Result<Sum, Box<Broken>> {
    let next = AtomicU64::new(seeds.start);
    let work = || {
        let mut sum = Sum::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return Ok(sum);
            }
            match run(seed, Mutant::Sound) {
                Ok(ran) => sum.add(&ran),
                Err(broken) => {
                    next.store(seeds.end, Ordering::Relaxed);
                    return Err(Box::new(broken));
                }
            }
        }
    };
    let sums = std::thread::scope(|scope| {
        [scope.spawn(work), scope.spawn(work)].map(|thread| thread.join().expect("it returns"))
    });
    sums.into_iter().try_fold(Sum::default(), |mut all, sum| {
        let sum = sum?;
        all.fewest = if all.schedules == 0 { sum.fewest } else { all.fewest.min(sum.fewest) };
        all.schedules += sum.schedules;
        all.events += sum.events;
        all.counts.merge(&sum.counts);
        Ok(all)
    })
}

/// Small and fixed: part of every `make test`.
#[test]
fn a_fixed_set_of_schedules_breaks_nothing() {
    let sum = run_all(0..3_000).unwrap_or_else(|broken| panic!("{broken}"));
    assert!(sum.fewest >= 200, "a schedule has {} events only", sum.fewest);
    assert!(sum.counts.rare(1).is_empty(), "never taken: {:?}", sum.counts.rare(1));
    assert!(sum.counts.unexpected().is_empty(), "taken and not listed: {:?}", sum.counts.unexpected());
}

/// The recorded run; `BATON_SIMULATION_SEEDS=7..8` runs one schedule again.
#[test]
#[ignore = "minutes; `make test-full` runs it"]
fn a_hundred_thousand_schedules_break_nothing() {
    let given = std::env::var("BATON_SIMULATION_SEEDS").ok();
    let seeds = given.as_ref().map_or(1_000_000..1_100_000, |given| {
        let (from, to) = given.split_once("..").expect("BATON_SIMULATION_SEEDS is FROM..TO");
        from.parse().expect("a seed")..to.parse().expect("a seed")
    });
    let began = Instant::now();
    let sum = run_all(seeds).unwrap_or_else(|broken| panic!("{broken}"));
    let seconds = began.elapsed().as_secs_f64();
    println!("{} schedules, {} events, at least {} each, {seconds:.0} s", sum.schedules, sum.events, sum.fewest);
    println!("{}", sum.counts);
    println!("taken fewer than 100 times: {:?}", sum.counts.rare(100));
    println!("taken and not listed: {:?}", sum.counts.unexpected());
    if given.is_none() {
        assert!(sum.fewest >= 200 && sum.counts.rare(100).is_empty() && sum.counts.unexpected().is_empty());
    }
}

/// A failure can be replayed: a seed gives one schedule.
#[test]
fn a_seed_gives_one_schedule() {
    for seed in 0..50 {
        let [one, two] = [(); 2].map(|()| run(seed, Mutant::Sound).unwrap_or_else(|broken| panic!("{broken}")));
        assert_eq!((one.events, one.counts.to_string()), (two.events, two.counts.to_string()), "seed {seed}");
    }
}

/// Each defect seeded on purpose is found, and soon, by the invariant that it breaks.
#[test]
fn seeded_defects_are_found() {
    for mutant in Mutant::ALL {
        let found = (0..10_000).find_map(|seed| run(seed, mutant).err());
        let broken = found.unwrap_or_else(|| panic!("{mutant:?} was not found"));
        assert_eq!(Some(broken.invariant), mutant.breaks(), "{mutant:?}: {broken}");
        if mutant == Mutant::DoubleFree {
            // The second free, of a request that was cancelled and committed.
            assert!(broken.events.last().is_some_and(|event| event.contains("CancelIncoming")), "{broken}");
        }
        println!("{mutant:?}: seed {}: {}", broken.seed, broken.what);
    }
}
