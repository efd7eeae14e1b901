//! Memory budget for answers that are kept: gathered whole, or not read yet.

use baton_node::intake::{Hold, IntakeFull};
use baton_types::{ErrorKind, RequestError};
use std::time::Duration;

/// Lists double their capacity as they grow.
pub(super) const DOUBLES: usize = 2;
/// Overhead of the allocator per allocation.
pub(super) const ALLOCATION_BYTES: usize = 16;

/// Memory is reserved in steps: all answers share one budget, and a token takes a few bytes.
const STEP_BYTES: u64 = 4 << 10;
/// Answers end within seconds.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Reserves memory for `bytes` of an answer before they are kept.
pub(crate) fn make_room(hold: &mut Hold, bytes: u64) -> Result<(), RequestError> {
    if bytes <= hold.bytes() {
        return Ok(());
    }
    hold.set(bytes.next_multiple_of(STEP_BYTES)).map_err(no_room)
}

/// The error if the budget has no room for an answer; it says what the client can do.
pub(crate) fn no_room(full: IntakeFull) -> RequestError {
    let whose = match full {
        IntakeFull::Share(max) | IntakeFull::Strangers(max) => {
            format!(
                "answers of this client that are gathered whole, or that it has not read, hold {max} bytes, its share"
            )
        }
        IntakeFull::All(max) => {
            format!("answers that are gathered whole, or not read, hold {max} bytes, which is the limit")
        }
    };
    let message = format!(
        "{whose}; read those that have come, ask for a stream, fewer samples, fewer log-probabilities or fewer requests at once, \
         or try again later"
    );
    RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
}
