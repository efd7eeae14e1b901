//! Connects a client's stream to everything that runs for it here, in any phase.

use baton_engine::SequenceControl;
use parking_lot::Mutex;
use std::sync::Arc;

/// Shared by the stream and by the thread that starts the sequence later.
#[derive(Clone, Default)]
pub(crate) struct Slot(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    #[default]
    Waiting,
    Running(SequenceControl),
    Cancelled,
}

impl Slot {
    /// Starts the sequence unless the stream has ended. `start` runs under the slot's lock, so a cancel happens before or after it, never
    /// in between.
    pub(crate) fn start<E>(&self, start: impl FnOnce() -> Result<SequenceControl, E>) -> Result<(), Option<E>> {
        let mut state = self.0.lock();
        match *state {
            State::Cancelled => Err(None),
            State::Waiting | State::Running(_) => {
                *state = State::Running(start().map_err(Some)?);
                Ok(())
            }
        }
    }

    /// The stream has ended: cancels what runs, or prevents it from starting.
    pub(crate) fn cancel(&self) {
        let before = std::mem::replace(&mut *self.0.lock(), State::Cancelled);
        if let State::Running(control) = before {
            control.cancel();
        }
    }
}
