//! What must hold, by name: a failure says which of these broke.

/// An invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invariant {
    /// A block has one owner, and the pool's books agree.
    OneOwner,
    /// What waits for room waits for blocks that somebody uses, or that are quarantined.
    NoDeadlock,
    /// A write reaches memory that is granted to it, and no other.
    GrantedMemory,
    /// A write reads blocks that its source still holds.
    HeldBlocks,
    /// KV that is adopted is that of its tokens.
    VerifiedKv,
    /// KV of a start before the one that a claim names is not adopted.
    NotAnOlderStart,
    /// KV of another start than the one that a claim names is not adopted.
    NoOtherStart,
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
    /// When all is quiet, nothing is held.
    Quiet,
    /// No check inside a core fails, and none is asked for what it does not know.
    Core,
}

impl Invariant {
    /// What a core's own check stands for. The pool looks at the owner of each block that is given back.
    pub(super) fn of_panic(message: &str) -> Self {
        let is_pools = message.starts_with("block ") && message.contains(", not ");
        if is_pools { Self::OneOwner } else { Self::Core }
    }
}
