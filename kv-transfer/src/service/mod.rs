//! The service: one progress thread that owns the transport and every handoff, and the handle that others hold.

mod checker;
mod connections;
mod counting;
mod dispatch;
mod fetching;
mod gathering;
mod inbox;
mod offers;
mod pinning;
mod posting;
mod progress;
mod pump;
mod receiving;
mod report;
mod sending;

pub(crate) use inbox::{Command, Inbox};

use crate::message::{GREETING_BYTES_MAX, Message};
use crate::plan::{check_blocks, check_from};
use crate::sink::SinkHandler;
use crate::{
    FetchRequest, Fetching, OpenRequest, Outgoing, Party, Peer, Region, TransferAddress, TransferConfig, TransferError,
    TransferStats,
};
use crate::{TransportChoice, transport};
use baton_types::RequestId;
use checker::Checker;
use parking_lot::Mutex;
use progress::Progress;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Cloneable handle of a running transfer service. The service stops with [`KvTransfer::stop`], or when the last handle goes; a
/// [`SinkHandler`] that keeps a handle keeps the service alive until `stop`.
#[derive(Clone)]
pub struct KvTransfer {
    shared: Arc<Shared>,
}

struct Shared {
    inbox: Arc<Inbox>,
    address: TransferAddress,
    fences: bool,
    config: TransferConfig,
    stats: Arc<Mutex<TransferStats>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl KvTransfer {
    /// Brings the transport up, registers the region and starts the progress thread. Waits until it runs, or failed to.
    pub fn start(
        config: TransferConfig,
        region: Arc<Region>,
        sink: Arc<dyn SinkHandler>,
    ) -> Result<Self, TransferError> {
        config.limits.check()?;
        if region.len() < config.map.bytes() {
            let (region, pool) = (region.len(), config.map.bytes());
            return Err(TransferError::Config(format!("a region of {region} bytes cannot hold a pool of {pool}")));
        }
        if config.shard.part(&config.compatibility.layout).as_ref() != Some(config.map.layout()) {
            let why = "the pool's layout is not the shard's part of that of the compatibility fingerprint";
            return Err(TransferError::Config(why.into()));
        }
        let stats = Arc::new(Mutex::new(TransferStats::default()));
        let (started, start) = mpsc::sync_channel(1);
        let body = {
            let (config, stats) = (config.clone(), stats.clone());
            move || match bring_up(config, region, sink, stats) {
                Ok(progress) => {
                    let transport = &progress.transport;
                    started.send(Ok((progress.inbox.clone(), transport.address(), transport.fences()))).ok();
                    progress.run();
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let failed = |detail| TransferError::Transport { transport: name(&config.transport), detail };
        let thread =
            std::thread::Builder::new().name("kv-progress".into()).spawn(body).map_err(|e| failed(e.to_string()))?;
        let (inbox, address, fences) = start.recv().map_err(|_| failed("its thread died".into()))??;
        Ok(Self {
            shared: Arc::new(Shared { inbox, address, fences, config, stats, thread: Mutex::new(Some(thread)) }),
        })
    }

    /// Where peers reach this service; goes into the membership record.
    pub fn address(&self) -> TransferAddress {
        self.shared.address.clone()
    }

    /// Whether every lane by which a peer could write here ends with its connection. Where one does not, blocks of a lost peer stay
    /// quarantined, and are counted by its instance's name.
    pub fn fences(&self) -> bool {
        self.shared.fences
    }

    /// This instance, as tickets name it.
    pub fn party(&self) -> &Party {
        &self.shared.config.party
    }

    /// Offers a sequence to `peer`. Returns at once; connection, grant and everything after show in the outcome.
    pub fn open(&self, peer: &Peer, request: OpenRequest) -> Result<Outgoing, TransferError> {
        if request.tokens == 0 {
            return Err(TransferError::Blocks("a handoff of no tokens".into()));
        }
        check_blocks(&self.shared.config.map, &request.blocks.0, request.tokens).map_err(TransferError::Blocks)?;
        let (sender, outcome) = oneshot::channel();
        let key = self.shared.inbox.open(peer.clone(), request, sender)?;
        Ok(Outgoing::new(self.shared.inbox.clone(), key, outcome))
    }

    /// Reads blocks of `peer` into blocks of this instance. Returns at once; everything after shows in the outcome.
    ///
    /// # Errors
    /// Where the blocks do not fit what is to be read, no block here begins with its first position, or as many handoffs as allowed are
    /// open. A first position that does not suit the peer fails the outcome, with [`crate::HandoffFailure::WholeOnly`].
    pub fn fetch(&self, peer: &Peer, request: FetchRequest) -> Result<Fetching, TransferError> {
        if request.tokens == 0 || request.name.len() > FetchRequest::NAME_BYTES_MAX {
            return Err(TransferError::Blocks("a get of no tokens, or with too long a name".into()));
        }
        let (map, from, tokens) = (&self.shared.config.map, request.from, request.tokens);
        check_from(map, from, tokens).map_err(TransferError::Blocks)?;
        check_blocks(map, &request.blocks.0, tokens - from).map_err(TransferError::Blocks)?;
        let (sender, outcome) = oneshot::channel();
        let key = self.shared.inbox.fetch(peer.clone(), request, sender)?;
        Ok(Fetching::new(self.shared.inbox.clone(), key, outcome))
    }

    /// The worker no longer wants this request: whatever of it is being received is given up, and its blocks return behind a fence. What
    /// is pinned for its readers is let go at once.
    pub fn cancel_incoming(&self, request_id: &RequestId, reason: impl Into<String>) {
        self.shared.inbox.cancel_incoming(request_id, reason.into());
    }

    /// The process of this incarnation is proven dead (by a pidfd, or by whoever fenced its machine): its lanes are drained and closed,
    /// and what it could have written is released.
    pub fn peer_is_dead(&self, party: &Party) {
        self.shared.inbox.push(Command::PeerDead(party.clone()));
    }

    /// Whether the service does its work. After a panic on one of its threads everything open has failed, nothing more is taken, and
    /// only a restart helps.
    pub fn healthy(&self) -> bool {
        !self.shared.inbox.has_failed()
    }

    /// Counters and gauges, at most some milliseconds old.
    pub fn stats(&self) -> TransferStats {
        self.shared.stats.lock().clone()
    }

    /// Aborts what is open, waits for peers to acknowledge until `deadline`, then tears everything down. Blocks until that is done,
    /// so a runtime calls it from a blocking task. Later calls return at once.
    pub fn stop(&self, deadline: Instant) {
        self.shared.stop(deadline);
    }
}

impl Shared {
    fn stop(&self, deadline: Instant) {
        self.inbox.push(Command::Stop(deadline));
        let thread = self.thread.lock().take();
        // A handler that drops the last handle does so on the progress thread, which cannot wait for itself.
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            thread.join().ok(); // A panic there was reported by its own hook.
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop(Instant::now() + self.config.limits.abort().min(Duration::from_secs(1)));
    }
}

impl std::fmt::Debug for KvTransfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvTransfer({} at {})", self.party(), self.shared.address)
    }
}

fn name(choice: &TransportChoice) -> &'static str {
    match choice {
        TransportChoice::Ucx { .. } => "ucx",
        TransportChoice::Tcp { .. } => "tcp",
    }
}

/// Everything that must be made on the progress thread itself.
fn bring_up(
    config: TransferConfig,
    region: Arc<Region>,
    sink: Arc<dyn SinkHandler>,
    stats: Arc<Mutex<TransferStats>>,
) -> Result<Progress, TransferError> {
    let (transport, wake) = transport::start(&config, region.clone())?;
    let greeting = Message::Hello(connections::hello(&config, transport.region(), config.party.clone())).encode();
    if greeting.len() > GREETING_BYTES_MAX {
        let detail = format!("a layout that takes {} bytes to greet with, of {GREETING_BYTES_MAX}", greeting.len());
        return Err(TransferError::Config(detail));
    }
    let inbox = Arc::new(Inbox::new(config.limits.outgoing_max, wake));
    let checker = Checker::start(region, config.map.clone(), inbox.clone())
        .map_err(|e| TransferError::Transport { transport: transport.name(), detail: e.to_string() })?;
    Ok(Progress::new(config, transport, inbox, sink, checker, stats))
}
