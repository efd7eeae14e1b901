//! The parts that take `now` and inputs and return decisions, for the simulation under virtual time. No part of the API.

pub use crate::checksum::{ALGORITHM, GRANULE, layer_sums};
pub use crate::handoff::exposure::{Admission, Exposure};
pub use crate::handoff::sink::{Expected, Sink, SinkAction, SinkInput};
pub use crate::handoff::source::{ABORT_EPOCH, Source, SourceAction, SourceInput};
pub use crate::message::{Commit, SumRun};
pub use crate::plan::{CopyRun, Side, copies};
