//! The engine thread: runs turns, sleeps when nothing can run, and ensures that every sequence gets its last event, even after a panic.

use crate::handle::EngineHandle;
use crate::mailbox::Mailbox;
use crate::model::ModelError;
use crate::runner::{Runner, Turn};
use crate::step_model::StepModel;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

pub(crate) fn spawn<M: StepModel>(runner: Runner<M>) -> io::Result<()> {
    thread::Builder::new().name("engine".into()).spawn(move || run(runner)).map(drop)
}

fn run<M: StepModel>(mut runner: Runner<M>) {
    let shared = runner.shared().clone();
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), ModelError> {
        loop {
            match runner.turn()? {
                Turn::Launched => {}
                Turn::Idle { until } => wait(&shared.mailbox, until),
                Turn::Ended => return Ok(()),
            }
        }
    }));
    let failure = match outcome {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(format!("the model failed: {error}")),
        // The panic hook has reported the panic.
        Err(_) => Some("the engine thread panicked".to_owned()),
    };
    // A sink or observer that panicked once may do so again; the thread's end must still be signalled.
    if catch_unwind(AssertUnwindSafe(|| runner.end(failure))).is_err() {
        tracing::error!("a sink panicked while its sequence was ended");
    }
    drop(runner);
    shared.health.alive(shared.clock.now(), false);
    *shared.ended.0.lock() = true;
    shared.ended.1.notify_all();
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Sleeps until there is input, or until this instant.
fn wait(mailbox: &Mailbox, until: Option<Instant>) {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    while mailbox.poll_changed(&mut Context::from_waker(&waker)).is_pending() {
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            None => thread::park(),
            Some(left) if left.is_zero() => return,
            Some(left) => thread::park_timeout(left),
        }
    }
}

impl EngineHandle {
    /// Ends every sequence with `Unavailable`, then the thread. Drain first. Returns whether the thread ended within `step_max`; must not
    /// be called from a sink or observer, which run on that thread.
    pub fn stop(&self) -> bool {
        let shared = self.shared();
        shared.mailbox.stop();
        let (ended, changed) = &shared.ended;
        let mut ended = ended.lock();
        let by = Instant::now() + shared.config.step_max;
        while !*ended && !changed.wait_until(&mut ended, by).timed_out() {}
        *ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_the_wait_is_not_lost() {
        let mailbox = Mailbox::default();
        mailbox.wake();
        wait(&mailbox, None); // Would hang.
        mailbox.take();
        mailbox.stop();
        wait(&mailbox, None);
        assert!(mailbox.take().stopped);
    }
}
