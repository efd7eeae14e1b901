//! The thread on which a service calls its handler.

use super::{Call, Calls};
use crate::handler::SinkHandler;
use crossbeam_channel::{Sender, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};

/// The queue needs no bound of its own: the driver bounds the number of pending calls, see [`Calls`].
pub(crate) struct CallThread {
    /// A second reference, so that the last one is dropped on the progress thread: it may own the last handle of the service.
    handler: Arc<dyn SinkHandler>,
    calls: Option<Sender<Call>>,
    thread: Option<JoinHandle<()>>,
}

impl CallThread {
    /// With the thread's id.
    pub(crate) fn start(handler: Arc<dyn SinkHandler>) -> std::io::Result<(Self, ThreadId)> {
        let (calls, receiver) = unbounded::<Call>();
        let called = handler.clone();
        let work = move || {
            for call in receiver {
                let inbox = call.inbox.clone();
                // The panic hook has reported the panic; the progress thread fails what is open.
                if catch_unwind(AssertUnwindSafe(|| call.make(&*called))).is_err() {
                    return inbox.fail();
                }
            }
        };
        let thread = std::thread::Builder::new().name("kv-worker".into()).spawn(work)?;
        let id = thread.thread().id();
        Ok((Self { handler, calls: Some(calls), thread: Some(thread) }, id))
    }
}

impl Calls for CallThread {
    fn submit(&mut self, call: Call) {
        if let Some(calls) = &self.calls {
            calls.send(call).ok(); // The thread ends early only after a panic, which the progress thread is notified of.
        }
    }

    fn joins_legs(&self) -> bool {
        self.handler.joins_legs()
    }
}

impl Drop for CallThread {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // The panic hook has reported a panic there.
        }
    }
}
