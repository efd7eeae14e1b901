//! A router's gRPC services as the commands use them, in types of the command line: protobuf types stop here.

mod admin;
mod inference;
mod status;
mod trace;

pub(crate) use admin::{Admin, DrainEvent, Drained};
pub(crate) use inference::{Last, Options, Prompt, Question};
#[cfg(test)]
pub(crate) use status::Problem;
pub(crate) use status::{BlockCounts, ClusterStatus, RouterStatus, WorkerStatus};
#[cfg(test)]
pub(crate) use trace::ProcessSpans;
pub(crate) use trace::{RequestTrace, Span};
