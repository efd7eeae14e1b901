//! Defects that a test injects on purpose into product code, to show that the simulation finds them.
//!
//! Only the feature `testing` compiles them. Without it [`seeded!`](crate::seeded) is `false`, and no binary contains any of this.

/// The marker that `cargo xtask hazards` searches for in a binary built with defects.
#[cfg(feature = "testing")]
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD types";

/// A guard that is left out.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Defect {
    /// Blocks that a peer may write are freed when its connection is lost, although the peer may still write them.
    ReleaseWithoutFence,
    /// Workers identify their peers by name and address, ignoring the incarnation.
    OtherIncarnation,
    /// A decode worker accepts an offer from another start of the prefill worker than the claim names.
    OlderIncarnation,
    /// Blocks that a store replaced by cached ones are freed twice.
    DoubleFree,
    /// A router accepts a member list from an etcd member that lags behind an earlier list.
    ViewGoesBack,
    /// KV is adopted without comparing its checksums.
    UnverifiedKv,
    /// Blocks that a peer could leave in quarantine count against its bound only once they are in quarantine.
    LateQuarantineBound,
    /// A router waits without a deadline after one of two streams broke.
    NoStreamDeadline,
    /// A grant reports one cached block more than there is.
    PartialGrantOffByOne,
    /// A forked sequence shares the block that both write.
    ForkShares,
    /// Pinned blocks are evicted.
    EvictedPin,
    /// The prefix index keeps the entries of a worker that left.
    IndexKeepsDeparted,
    /// An expired pin is confirmed as if it were still held, with checksums of whatever the blocks contain by then.
    ExpiredPinAdopted,
    /// Offers that fit are granted although an earlier offer does not fit.
    StarvingGrant,
    /// Workers treat all tenants as one: first come, first served.
    IgnoredShares,
    /// The turns of tenants are those of equal weights.
    IgnoredWeights,
    /// A grant does not move virtual time.
    GrantWithoutTime,
    /// A peer is granted blocks of the worker although others of it were quarantined after the worker was asked.
    GrantDespiteQuarantine,
    /// After a move, the tokens generated before count as prompt.
    ReplayAsPrompt,
    /// A device computes a step with the block tables of the step before.
    StaleTable,
    /// The first proposed token that was not sampled is taken all the same.
    RejectedTaken,
    /// The KV of a proposed token that was not sampled is cached as if it were that of the sampled one.
    RejectedKvCached,
    /// The draft model keeps the KV of its proposals that were not sampled, as if they were tokens.
    RejectedDraftKept,
    /// Blocks of an ended sequence are free while a launched step still stores to them.
    EarlyReuse,
    /// A request without room for its KV moves as often as another decode worker has room.
    EndlessMoves,
}

#[cfg(feature = "testing")]
thread_local! {
    static SEEDED: std::cell::Cell<Option<Defect>> = const { std::cell::Cell::new(None) };
}

/// Injects a defect into what this thread does from now on; `None` removes it.
#[cfg(feature = "testing")]
pub fn seed(defect: Option<Defect>) {
    // Read, so that no linker drops it.
    std::hint::black_box(MARKER);
    SEEDED.set(defect);
}

/// Whether a defect is injected in this thread.
#[cfg(feature = "testing")]
pub fn is_seeded(defect: Defect) -> bool {
    SEEDED.get() == Some(defect)
}

/// Whether a [`Defect`](defect::Defect) is injected: never, without the feature `testing`.
#[cfg(feature = "testing")]
#[macro_export]
macro_rules! seeded {
    ($defect:ident) => {
        $crate::defect::is_seeded($crate::defect::Defect::$defect)
    };
}
/// Whether a defect is injected: never, without the feature `testing`.
#[cfg(not(feature = "testing"))]
#[macro_export]
macro_rules! seeded {
    ($defect:ident) => {
        false
    };
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;

    #[test]
    fn a_defect_is_seeded_into_one_thread() {
        seed(Some(Defect::DoubleFree));
        assert!(seeded!(DoubleFree) && !seeded!(ForkShares));
        std::thread::spawn(|| assert!(!seeded!(DoubleFree))).join().expect("the other thread has none");
        seed(None);
        assert!(!seeded!(DoubleFree));
    }
}
