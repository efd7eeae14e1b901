//! The parts that take `now` and inputs and return decisions, for the simulation under virtual time. No part of the API.

pub use crate::admission::{Admission, Place};
pub use crate::placement::{
    Decision, Demand, Measured, Numbers, PendingPrefixes, PlacementPolicy, Reason, Refusal, Slowness, Thresholds,
    Worker, place, work_tokens,
};
pub use crate::recovery::{
    Avoid, Avoided, Circle, Failure, FromDecode, FromPrefill, GiveUp, Pair, Phase, Probation, ProbationLimits,
    Recovery, Retry, RetryBucket, RetryLimits, Says, Unlike,
};
pub use crate::request::PrefillPolicy;
pub use crate::workers::{Heard, Load};
