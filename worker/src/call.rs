//! An accepted call of a role's service.

use crate::drain::RunningCall;
use crate::spans::Parent;
use std::time::Instant;

/// What every call has in common.
pub struct CallContext {
    /// When the call arrived.
    pub since: Instant,
    /// When the call must have ended.
    pub deadline: Instant,
    /// Counts the call for the drain until it is dropped.
    pub running: RunningCall,
    pub parent: Parent,
}
