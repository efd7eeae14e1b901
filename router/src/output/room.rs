//! Room for answers that are kept: gathered whole, or not read yet.

use baton_node::intake::{Hold, IntakeFull};
use baton_types::{ErrorKind, RequestError};
use std::time::Duration;

/// Lists double as they grow.
pub(super) const DOUBLES: usize = 2;
/// What an allocator takes for itself.
pub(super) const ALLOCATION_BYTES: usize = 16;

/// Room is taken in steps: one budget serves all answers, and a token takes some bytes.
const STEP_BYTES: u64 = 4 << 10;
/// Answers come and go within seconds.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Makes room for `bytes` of an answer, before they are kept.
pub(super) fn make_room(hold: &mut Hold, bytes: u64) -> Result<(), RequestError> {
    if bytes <= hold.bytes() {
        return Ok(());
    }
    hold.set(bytes.next_multiple_of(STEP_BYTES)).map_err(no_room)
}

/// What a client does about an answer that there is no room for.
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
