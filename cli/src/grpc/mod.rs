//! What verbs ask of a router over gRPC, in types of the command line: protobuf types stop here.

mod admin;
mod inference;
mod status;
mod trace;

pub(crate) use admin::{Admin, DrainEvent, Drained};
pub(crate) use inference::{Answer, Last, Options, Prompt, Question};
pub(crate) use status::{BlockCounts, ClusterStatus, Problem, RouterStatus, WorkerStatus};
pub(crate) use trace::{ProcessSpans, RequestTrace, Span};
