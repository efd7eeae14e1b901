//! The parts that take `now` and inputs and return decisions, for the simulation under virtual time. No part of the API.

pub use crate::checksum::{ALGORITHM, GRANULE, layer_sums};
pub use crate::driver::exposure::{Admission, Exposure};
pub use crate::message::{Commit, SumRun};
pub use crate::plan::{CopyRun, Side, copies};
pub use crate::put::sink::machine::{Expected, Sink, SinkAction, SinkInput};
pub use crate::put::source::machine::{ABORT_EPOCH, Source, SourceAction, SourceInput};
