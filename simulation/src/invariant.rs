//! What must hold, by name: a failure says which of these broke.

use parking_lot::Mutex;
use std::sync::Arc;

/// An invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invariant {
    /// A block has one owner, and the pool's books agree.
    OneOwner,
    /// A write reaches memory that is granted to it, and no other.
    WritesWithinGrants,
    /// KV that is adopted is that of its tokens.
    VerifiedKv,
    /// A call is served by the start of a worker that it was meant for.
    RightIncarnation,
    /// No source leaves more in quarantine than its bound.
    QuarantineBound,
    /// No handoff fails for a reason that correct workers never have.
    NoProtocolError,
    /// Views go forward, and end at what is registered.
    ForwardViews,
    /// Clients are sent the right answer.
    RightAnswer,
    /// Each request ends by its deadline, and soon after all repairs without it; with an error only where it may.
    EveryEnd,
    /// Calls to workers keep the limits of attempts, moves, retries, back-off and time.
    BoundedCalls,
    /// A tenant below its share is served in time, whatever others ask for.
    FairShare,
    /// When all is quiet, nothing is held.
    Quiet,
    /// When all is quiet, a router knows what its workers have cached, and nothing else.
    TrueIndex,
    /// No check inside a core fails.
    Core,
}

impl Invariant {
    /// What a core's own check stands for. The pool looks at the owner of each block that is given back.
    pub(crate) fn of_panic(message: &str) -> Self {
        let is_pools = message.starts_with("block ") && message.contains(", not ");
        if is_pools { Self::OneOwner } else { Self::Core }
    }
}

/// What broke, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    /// Which invariant.
    pub invariant: Invariant,
    /// How.
    pub what: String,
}

/// Breaches of one schedule so far. Clones are the same ones.
#[derive(Clone, Debug, Default)]
pub struct Breaches(Arc<Mutex<Vec<Breach>>>);

impl Breaches {
    /// Something broke.
    pub fn add(&self, invariant: Invariant, what: String) {
        self.0.lock().push(Breach { invariant, what });
    }

    /// The first one.
    pub fn first(&self) -> Option<Breach> {
        self.0.lock().first().cloned()
    }
}
