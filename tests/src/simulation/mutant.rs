//! Defects seeded on purpose, to show that the simulation finds them. Each is a misuse of the cores by the shell around them.

/// Which defect a schedule runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// None.
    Sound,
    /// Blocks of an unfenced peer are taken to be fenced when its connection closes.
    ReleaseWithoutFence,
    /// Workers know their peers by name and address, not by incarnation.
    OtherIncarnation,
    /// A cancelled request frees blocks that its adopted sequence owns.
    DoubleFree,
    /// A router lists from a member of etcd that lags.
    ViewGoesBack,
    /// A reservation takes what is free, and waits for the rest.
    PiecewiseReservation,
    /// Checksums are taken to be right, whatever arrived.
    UnverifiedKv,
    /// What a source could leave in quarantine counts only once it is there.
    LateQuarantineBound,
}

impl Mutant {
    /// All defects.
    pub const ALL: [Self; 7] = [
        Self::ReleaseWithoutFence,
        Self::OtherIncarnation,
        Self::DoubleFree,
        Self::ViewGoesBack,
        Self::PiecewiseReservation,
        Self::UnverifiedKv,
        Self::LateQuarantineBound,
    ];

    pub(super) fn pretends_fences(self) -> bool {
        self == Self::ReleaseWithoutFence
    }

    pub(super) fn ignores_incarnations(self) -> bool {
        self == Self::OtherIncarnation
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

    pub(super) fn reserves_piecewise(self) -> bool {
        self == Self::PiecewiseReservation
    }
}
