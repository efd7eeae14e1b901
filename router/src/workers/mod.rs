//! The workers that this router knows: a channel, a load and a text each.
//!
//! A worker is *admitted* once it answered on its own address and the text of its model is loaded; only admitted workers with a
//! fresh, healthy load are placed on.

mod load;
mod set;
mod supervise;

pub use load::Load;
#[cfg(test)]
pub(crate) use set::ModelKey;
pub(crate) use set::{ServedModel, WorkerSet};
pub(crate) use supervise::{Supervisor, supervise};

use crate::models::ModelText;
use crate::recovery::Probation;
use baton_types::{InstanceRecord, Party};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

/// A connection attempt to a live worker on a healthy network takes far less.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// How soon a silent peer is noticed: interval plus timeout stay under the 10 s in which nothing may be held for the dead.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(4);
/// A client that does not read pauses its worker once so many bytes are on their way: some hundred tokens.
const STREAM_WINDOW_BYTES: u32 = 16 << 10;
/// The same for all streams of one worker together: those that are read must not wait for those that are not.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;

/// One worker in one incarnation.
#[derive(Debug)]
pub(crate) struct WorkerHandle {
    /// What it says of itself.
    pub(crate) record: Arc<InstanceRecord>,
    /// Its load.
    pub(crate) load: Load,
    /// Whether it failed of late.
    pub(crate) probation: Probation,
    channel: Channel,
    text: OnceLock<Option<Arc<ModelText>>>,
    admitted: AtomicBool,
}

impl WorkerHandle {
    /// A handle that connects when first used. Fails where the endpoint is no address.
    pub(crate) fn new(record: Arc<InstanceRecord>) -> Result<Self, tonic::transport::Error> {
        let channel = Endpoint::from_shared(format!("http://{}", record.endpoint))?
            .connect_timeout(CONNECT_MAX)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .connect_lazy();
        let (load, probation) = (Load::default(), Probation::default());
        Ok(Self { record, load, probation, channel, text: OnceLock::new(), admitted: AtomicBool::new(false) })
    }

    /// Its channel; clones share one connection.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Which incarnation of which instance.
    pub(crate) fn party(&self) -> &Party {
        &self.record.party
    }

    /// The text of its model once loaded: outer `None` before, inner `None` where the model has none.
    pub(crate) fn text(&self) -> Option<&Option<Arc<ModelText>>> {
        self.text.get()
    }

    /// Whether the worker was told that it is admitted, and not evicted since.
    pub(crate) fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::Acquire)
    }

    fn set_admitted(&self, admitted: bool) -> bool {
        self.admitted.swap(admitted, Ordering::AcqRel)
    }

    /// Sets the text, once.
    pub(crate) fn set_text(&self, text: Option<Arc<ModelText>>) {
        let _ = self.text.set(text);
    }
}
