//! Puts: a source writes its blocks into blocks that a sink granted.

mod request;
pub(crate) mod sink;
pub(crate) mod source;
mod timings;

pub use request::{CommitPayload, PutOutcome, PutReport, PutRequest};
pub(crate) use sink::Sink;
pub(crate) use source::Source;
