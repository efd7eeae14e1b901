//! One schedule from its seed to quiet.

use crate::checks;
use crate::client::Ending;
use crate::counts::Counts;
use crate::executor::{Time, ms};
use crate::invariant::{Breach, Invariant};
use crate::model::VOCAB;
use crate::schedule::{END, Schedule, WELL};
use crate::scheduled::Scheduled;
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// All is quiet so long after the last end: pins, probations and aborts are over.
const SETTLES: Time = ms(3_500);
/// A schedule takes a hundredth of these; with more, tasks wake each other without end.
const EVENTS_MAX: u64 = 500_000;

/// A schedule in which nothing broke.
#[derive(Clone, Debug)]
pub struct Ran {
    /// What happened: polls of tasks and calls.
    pub events: u64,
    /// Of what kinds.
    pub counts: Counts,
    /// A digest of when everything happened.
    pub digest: u64,
}

/// A schedule in which something broke.
#[derive(Clone, Debug)]
pub struct Broken {
    /// Its seed.
    pub seed: u64,
    /// What broke first.
    pub breach: Breach,
    /// When, in microseconds.
    pub at: Time,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, breach: Breach { invariant, what }, at } = self;
        write!(f, "seed {seed} breaks {invariant:?} at {at} us: {what}")
    }
}

/// Runs the schedule of a seed.
///
/// # Errors
/// What broke first.
pub fn run(seed: u64) -> Result<Ran, Broken> {
    run_of(seed, false)
}

/// Runs the schedule of a seed with a model that has states.
///
/// # Errors
/// What broke first.
pub fn run_with_states(seed: u64) -> Result<Ran, Broken> {
    run_of(seed, true)
}

/// States of a pool: what those that run have at once, and half as many for prefixes that are cached. Shares are measured in blocks of the
/// KV, so there are enough for any number of sequences where it counts who is served first.
fn states(schedule: &Schedule) -> u32 {
    let shape = &schedule.shape;
    let is_fair = schedule.requests.iter().any(|request| request.fair_within.is_some() || request.is_in_race);
    match is_fair {
        true => 2 * shape.prefill_blocks.max(shape.blocks) + shape.watermark_blocks,
        false => 3 * shape.running_max as u32 + shape.watermark_blocks,
    }
}

fn run_of(seed: u64, has_states: bool) -> Result<Ran, Broken> {
    let cluster = Scheduled::start(seed, |random| {
        let mut schedule = Schedule::draw(random, VOCAB);
        if has_states {
            schedule.shape.states = states(&schedule);
        }
        schedule
    });
    let ran = catch_unwind(AssertUnwindSafe(|| to_quiet(&cluster)));
    let at = cluster.executor.time();
    let events = cluster.executor.steps();
    let digest = {
        let mut hasher = DefaultHasher::new();
        (cluster.ends.all(), events, at, &*cluster.counts.lock()).hash(&mut hasher);
        hasher.finish()
    };
    let counts = cluster.counts.lock().clone();
    // What a panic left may panic again.
    let ended = catch_unwind(AssertUnwindSafe(|| cluster.end()));
    let breach = match ran.and(ended) {
        Ok(()) => cluster.breaches.first(),
        Err(panic) => {
            let message = panic.downcast_ref::<String>().cloned();
            let message = message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            let what = message.unwrap_or_else(|| "a panic without a message".into());
            cluster.breaches.first().or(Some(Breach { invariant: Invariant::of_panic(&what), what }))
        }
    };
    match breach {
        Some(breach) => Err(Broken { seed, breach, at }),
        None => Ok(Ran { events, counts, digest }),
    }
}

/// Lets everything happen until all is quiet, or something broke.
fn to_quiet(cluster: &Scheduled) {
    let (executor, breaches) = (&cluster.executor, &cluster.breaches);
    let mut quiet_at = END;
    while executor.step(quiet_at) {
        if breaches.first().is_some() {
            return;
        }
        if executor.steps() > EVENTS_MAX {
            return breaches.add(Invariant::Core, format!("{EVENTS_MAX} events, and no end"));
        }
        if quiet_at == END && executor.time() >= WELL && cluster.ends.are_all() {
            quiet_at = (executor.time() + SETTLES).min(END);
        }
    }
    checks::quiet(cluster);
    for slot in 0..cluster.schedule().shape.slots() {
        cluster.tally(slot);
    }
    let mut counts = cluster.counts.lock();
    for (_, end) in cluster.ends.all().into_iter().flatten() {
        counts.add(
            match end {
                Ending::Whole => "request: whole".to_owned(),
                Ending::Failed(kind, _) => format!("request: {}", kind.name()),
                Ending::WithRouter => "request: with its router".to_owned(),
                Ending::NoRouter => "request: no router".to_owned(),
                Ending::Gone => "request: cancelled".to_owned(),
            },
            1,
        );
    }
}
