//! Guards that tests leave out, to show what each is for. Without the feature `testing` there is no hazard to choose, and no code of one.

/// Shipped binaries are searched for this text.
#[cfg(any(test, feature = "testing"))]
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD kv-transfer";

/// What is left out.
#[cfg(any(test, feature = "testing"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hazard {
    /// A sink takes commits whose ticket is over.
    LateCommits,
    /// A sink takes each commit as if it were the first.
    DoubledCommits,
    /// As if some lane could not be fenced: blocks stay quarantined.
    NoFences,
    /// Blocks return, and the connection's endpoint and worker live on. Those of a get that is given up return at once, whatever its owner
    /// still writes.
    PretendedFences,
    /// An expired pin's blocks are free, and the reader is told that it held, with checksums of what is there then.
    PretendedPins,
    /// A ticket stands for the messages of whoever names it.
    TicketsOfAnyone,
    /// Whoever answers at an address, or offers in a name, is taken for the start that is meant.
    AnyIncarnation,
    /// Models, layouts and classes are taken to agree.
    AnyFingerprint,
    /// A source can also write the blocks whose KV was here before, which other sequences read.
    WindowsOfAllBlocks,
}

/// The hazards of one service.
#[cfg(any(test, feature = "testing"))]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hazards(std::collections::BTreeSet<Hazard>);

#[cfg(any(test, feature = "testing"))]
impl Hazards {
    pub(crate) fn has(&self, hazard: Hazard) -> bool {
        self.0.contains(&hazard)
    }

    pub(crate) fn announce(&self) {
        if !self.0.is_empty() {
            tracing::warn!(hazards = ?self.0, "{MARKER}: guards are left out on purpose");
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl<I: IntoIterator<Item = Hazard>> From<I> for Hazards {
    fn from(hazards: I) -> Self {
        Self(hazards.into_iter().collect())
    }
}

/// Whether a guard is left out: never, without the feature.
#[cfg(any(test, feature = "testing"))]
macro_rules! hazard {
    ($config:expr, $hazard:ident) => {
        $config.hazards.has($crate::hazards::Hazard::$hazard)
    };
}
#[cfg(not(any(test, feature = "testing")))]
macro_rules! hazard {
    ($config:expr, $hazard:ident) => {{
        let _ = &$config;
        false
    }};
}
pub(crate) use hazard;
