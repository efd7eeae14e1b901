//! The pure cores of router, workers, transfer and membership run together under virtual time, in one thread.
//!
//! A seed gives the schedule: delays, reorderings, stalls, crashes and restarts, cut links, cancels, deadlines, full pools, an etcd that
//! is away, wiped or restored. What decides is the code that ships: placement, recovery and the pairing of two streams, the membership
//! view, the scheduler, the pool, the claims, both ends of a handoff. What carries their decisions out, threads and sockets otherwise, is
//! the shell in this folder: it has queues of events in the place of both.
//!
//! ```text
//! shape ── requests, faults ──> world ── events in order of time ──> router, worker, etcd
//!                                 └── after each: invariants
//! ```
//!
//! The model is a stand-in whose next token is a hash of the KV as read from the blocks, and the right answer is computed without any.

mod call;
mod clock;
mod counts;
mod deliver;
mod embedded;
mod engine;
mod etcd;
mod event;
mod faults;
mod flow;
mod handoff;
mod hear;
mod invariant;
mod invariants;
mod model;
mod mutant;
mod pieces;
mod random;
mod receive;
mod router;
mod shape;
mod wire;
mod worker;
mod world;

pub use counts::Counts;
pub use invariant::Invariant;
pub use mutant::Mutant;

use crate::processes::commit;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::World;

/// A schedule that broke an invariant.
#[derive(Debug)]
pub struct Broken {
    /// Gives the same schedule again.
    pub seed: u64,
    /// Which invariant.
    pub invariant: Invariant,
    /// What broke.
    pub what: String,
    /// The last events before.
    pub events: Vec<String>,
}

/// What a sound schedule leaves.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Events that happened.
    pub events: u64,
    /// Transitions taken.
    pub counts: Counts,
}

/// Runs the schedule of a seed.
pub fn run(seed: u64, mutant: Mutant) -> Result<Ran, Broken> {
    attempt(seed, mutant, false).map_err(|_| match attempt(seed, mutant, true) {
        Err(broken) => broken,
        Ok(_) => Broken {
            seed,
            invariant: Invariant::Core,
            what: "the schedule is not the same twice".into(),
            events: Vec::new(),
        },
    })
}

fn attempt(seed: u64, mutant: Mutant, shows: bool) -> Result<Ran, Broken> {
    let mut world = World::new(seed, mutant, shows);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    let (invariant, what) = match ended {
        Ok(Ok(())) => return Ok(Ran { events: world.events, counts: world.counts }),
        Ok(Err(broken)) => broken,
        Err(panic) => {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            let said = said.unwrap_or_default();
            let (invariant, what) = (Invariant::of_panic(&said), format!("a core panicked: {said}"));
            let events = world.shown();
            std::mem::forget(world); // Its leases would panic again.
            return Err(Broken { seed, invariant, what, events });
        }
    };
    let events = world.shown();
    if mutant != Mutant::Sound {
        std::mem::forget(world);
    }
    Err(Broken { seed, invariant, what, events })
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))?;
        writeln!(f, "seed {} at commit {}: {:?}: {}", self.seed, commit(), self.invariant, self.what)?;
        write!(
            f,
            "again: BATON_SIMULATION_SEEDS={}..{} cargo test --release -p baton-tests --test simulation -- --ignored --nocapture",
            self.seed,
            self.seed + 1
        )
    }
}
