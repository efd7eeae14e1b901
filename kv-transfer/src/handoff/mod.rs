//! The state machines of one handoff, source and sink. Pure: they take inputs and the time, and return actions.
//!
//! ```text
//! source   Offering ──► Writing ──► Committed ──► done
//!             └────────────┴─► Flushing (abort) ─────┘
//! sink     Claimed ──► Reserved ──► Receiving ──► Verified ──► Running
//!                          └────────────┴─► Aborting ──► Quarantined ──► Free
//! ```
//!
//! Neither knows a transport, a thread or a clock, nor which of prefill and decode it serves.

pub(crate) mod coverage;
pub(crate) mod exposure;
#[cfg(test)]
mod hazards;
pub(crate) mod owner;
#[cfg(test)]
mod parts_tests;
pub(crate) mod reader;
pub(crate) mod sink;
pub(crate) mod source;

pub(crate) use exposure::{Admission, Exposure};
pub(crate) use owner::{Owner, OwnerAction, OwnerInput};
pub(crate) use reader::{Reader, ReaderAction, ReaderInput};
pub(crate) use sink::{Sink, SinkAction, SinkInput};
pub(crate) use source::{Source, SourceAction, SourceInput};
