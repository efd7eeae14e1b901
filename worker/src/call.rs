//! A call of a role's service that was taken up.

use crate::drain::RunningCall;
use crate::spans::Parent;
use std::time::Instant;

/// What every call has, whatever it asks for.
pub struct CallContext {
    /// When it came.
    pub since: Instant,
    /// When it ends, whatever came of it.
    pub deadline: Instant,
    /// Counts it for the drain until it is dropped.
    pub running: RunningCall,
    pub parent: Parent,
}
