//! Defects that a test seeds on purpose into the code that ships, to show that the simulation finds them.
//!
//! Only the feature `testing` compiles them. Without it [`seeded!`](crate::seeded) is `false`, and nothing of this is in a binary.

/// What `cargo xtask hazards` finds in a binary that was built with defects.
#[cfg(feature = "testing")]
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD types";

/// One guard that is left out.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Defect {
    /// Blocks of a peer whose connection is lost are free at once, though it may still write them.
    ReleaseWithoutFence,
    /// Workers know their peers by name and address, not by incarnation.
    OtherIncarnation,
    /// A decode worker takes the offer of another start of the prefill worker that was claimed for.
    OlderIncarnation,
    /// Blocks that a store exchanged for cached ones are given back twice.
    DoubleFree,
    /// A router takes a list of an etcd member that lags behind what it has seen.
    ViewGoesBack,
    /// Checksums are taken to be right, whatever arrived.
    UnverifiedKv,
    /// What a peer could leave in quarantine counts only once it is there.
    LateQuarantineBound,
    /// A router waits without end where one of two streams broke.
    EndlessDoubt,
    /// A grant says that one block more is cached than is.
    PartialGrantOffByOne,
    /// A forked sequence shares the block that both write.
    ForkShares,
    /// Room is made of pinned blocks.
    EvictedPin,
    /// The prefix index keeps what a worker had that left.
    IndexKeepsTheDead,
    /// An expired pin is confirmed as if it had held, with checksums of what stands there by then.
    ExpiredPinAdopted,
    /// Offers that fit are granted although one before them does not.
    StarvingGrant,
    /// All tenants are one to workers: whoever came first is served first.
    IgnoredShares,
}

#[cfg(feature = "testing")]
thread_local! {
    static SEEDED: std::cell::Cell<Option<Defect>> = const { std::cell::Cell::new(None) };
}

/// Seeds a defect into what this thread does from now on; `None` takes it out.
#[cfg(feature = "testing")]
pub fn seed(defect: Option<Defect>) {
    // Read, so that no linker drops it.
    std::hint::black_box(MARKER);
    SEEDED.set(defect);
}

/// Whether a defect is seeded into this thread.
#[cfg(feature = "testing")]
pub fn is_seeded(defect: Defect) -> bool {
    SEEDED.get() == Some(defect)
}

/// Whether a [`Defect`](defect::Defect) is seeded: never, without the feature `testing`.
#[cfg(feature = "testing")]
#[macro_export]
macro_rules! seeded {
    ($defect:ident) => {
        $crate::defect::is_seeded($crate::defect::Defect::$defect)
    };
}
/// Whether a defect is seeded: never, without the feature `testing`.
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
