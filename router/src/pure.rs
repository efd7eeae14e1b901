//! The parts that take `now` and inputs and return decisions, for the simulation under virtual time. No part of the API.

pub use crate::admission::{Admission, Slot};
pub use crate::placement::{
    Decision, Demand, Measured, Numbers, PendingPrefixes, PlacementPolicy, Reason, Refusal, Slowness, Thresholds,
    Worker, place, work_tokens,
};
pub use crate::recovery::{
    Avoid, Avoided, Circle, Failure, FromDecode, FromPrefill, GiveUp, Next, Pair, PrefillFault, Probation,
    ProbationLimits, Recovery, Retry, RetryBucket, RetryLimits, Step,
};
pub use crate::request::PrefillPolicy;
pub use crate::workers::{LastReport, Load};
