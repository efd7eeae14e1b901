//! Guards that tests can leave out, to show what each one prevents. Without the feature `testing` there is no hazard to choose, and no code
//! for one.

/// Checks search shipped binaries for this text.
#[cfg(any(test, feature = "testing"))]
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD kv-transfer";

/// A guard that is left out.
#[cfg(any(test, feature = "testing"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hazard {
    /// A sink accepts commits whose ticket has ended.
    LateCommits,
    /// A sink processes each commit as if it were the first.
    DoubledCommits,
    /// Lanes count as impossible to fence: blocks stay quarantined.
    NoFences,
    /// Blocks are released while the connection's endpoint and worker stay alive. Blocks of an aborted get are released at once, while its
    /// owner may still write.
    PretendedFences,
    /// An expired pin frees its blocks, but the owner confirms that it held, with checksums of the current bytes.
    PretendedPins,
    /// A ticket accepts messages of any peer that names it.
    TicketsOfAnyone,
    /// A peer that answers at an address, or offers in a name, is taken for the expected incarnation without a check.
    AnyIncarnation,
    /// Models, layouts and classes are assumed to match.
    AnyFingerprint,
    /// Flushes are answered once the writes before them have begun to be stored in the pool's memory, not once they are stored.
    UnstoredWrites,
    /// Blocks are released and delivered while writes that came before may be on their way into them.
    UndrainedWindows,
    /// What a NIC stored in a device's memory is compared, adopted and released before the device is sure to see it.
    UnseenWrites,
    /// A source takes the fence of every layer for done.
    EarlyReads,
    /// A source may also write the blocks whose KV was cached here before, which other sequences read.
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

/// Whether a guard is left out; always `false` without the feature.
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
