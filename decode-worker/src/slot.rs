//! What ties a client's stream to everything that runs for it here, whatever phase that is in.

use baton_engine::SequenceControl;
use parking_lot::Mutex;
use std::sync::Arc;

/// Shared by the stream and by whoever starts the sequence later, on another thread.
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
    /// Starts the sequence unless the stream is gone. `start` runs under the slot's lock, so a cancel comes before or after, never between.
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

    /// The stream is gone: cancels what runs, or keeps it from starting.
    pub(crate) fn cancel(&self) {
        let before = std::mem::replace(&mut *self.0.lock(), State::Cancelled);
        if let State::Running(control) = before {
            control.cancel();
        }
    }
}
