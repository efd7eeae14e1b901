//! Defects seeded on purpose, to show that the simulation finds them. Each is a misuse of the cores by the shell around them.

use super::invariant::Invariant;

/// Which defect a schedule runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// None.
    Sound,
    /// Blocks of an unfenced peer are taken to be fenced when its connection closes.
    ReleaseWithoutFence,
    /// Workers know their peers by name and address, not by incarnation.
    OtherIncarnation,
    /// Attempts of a request have one name, and workers take KV by that name and the source's: a commit that was on its way when its source
    /// died and started again meets the claim that names the next start.
    OlderIncarnation,
    /// A cancel that reaches the transfer after the commit gives the blocks back, which whoever took the commit has or gave back.
    DoubleFree,
    /// A router lists from a member of etcd that lags.
    ViewGoesBack,
    /// Reservations that wait take blocks one by one, in turn, and hold what they have: two of them can wait for each other.
    PiecewiseReservation,
    /// Checksums are taken to be right, whatever arrived.
    UnverifiedKv,
    /// What a source could leave in quarantine counts only once it is there.
    LateQuarantineBound,
    /// A router never asks again what it waited for when one of two streams broke: only the deadline ends such a request.
    EndlessDoubt,
}

impl Mutant {
    /// All defects.
    pub const ALL: [Self; 9] = [
        Self::ReleaseWithoutFence,
        Self::OtherIncarnation,
        Self::OlderIncarnation,
        Self::DoubleFree,
        Self::ViewGoesBack,
        Self::PiecewiseReservation,
        Self::UnverifiedKv,
        Self::LateQuarantineBound,
        Self::EndlessDoubt,
    ];

    /// What it breaks first.
    pub fn breaks(self) -> Option<Invariant> {
        Some(match self {
            Self::Sound => return None,
            Self::ReleaseWithoutFence => Invariant::GrantedMemory,
            Self::OtherIncarnation => Invariant::NoOtherStart,
            Self::OlderIncarnation => Invariant::NotAnOlderStart,
            Self::DoubleFree => Invariant::OneOwner,
            Self::ViewGoesBack => Invariant::ForwardViews,
            Self::PiecewiseReservation => Invariant::NoDeadlock,
            Self::UnverifiedKv => Invariant::VerifiedKv,
            Self::LateQuarantineBound => Invariant::QuarantineBound,
            Self::EndlessDoubt => Invariant::EveryEnd,
        })
    }

    pub(super) fn pretends_fences(self) -> bool {
        self == Self::ReleaseWithoutFence
    }

    pub(super) fn ignores_incarnations(self) -> bool {
        self == Self::OtherIncarnation
    }

    pub(super) fn reuses_names(self) -> bool {
        self == Self::OlderIncarnation
    }

    pub(super) fn frees_twice(self) -> bool {
        self == Self::DoubleFree
    }

    pub(super) fn lists_from_the_past(self) -> bool {
        self == Self::ViewGoesBack
    }

    pub(super) fn trusts_bytes(self) -> bool {
        self == Self::UnverifiedKv
    }

    pub(super) fn looks_at_quarantine_alone(self) -> bool {
        self == Self::LateQuarantineBound
    }

    pub(super) fn doubts_for_ever(self) -> bool {
        self == Self::EndlessDoubt
    }

    pub(super) fn reserves_piecewise(self) -> bool {
        self == Self::PiecewiseReservation
    }
}
