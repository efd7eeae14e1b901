//! The service: one progress thread that owns the transport and every handoff, and the handle that others hold.

mod inbox;

pub(crate) use inbox::{Command, Inbox};

use crate::Party;
use crate::sink::SinkHandler;
use crate::{OpenRequest, Outgoing, Peer, Region, TransferAddress, TransferConfig, TransferError, TransferStats};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Cloneable handle of a running transfer service. The service stops when [`KvTransfer::stop`] is called or the last handle goes.
#[derive(Clone)]
pub struct KvTransfer {
    shared: Arc<Shared>,
}

struct Shared {
    inbox: Arc<Inbox>,
    address: TransferAddress,
    config: TransferConfig,
    stats: Arc<Mutex<TransferStats>>,
}

impl KvTransfer {
    /// Brings the transport up, registers the region and starts the progress thread.
    pub fn start(
        config: TransferConfig,
        region: Arc<Region>,
        sink: Arc<dyn SinkHandler>,
    ) -> Result<Self, TransferError> {
        config.limits.check()?;
        let _ = (region, sink);
        Err(TransferError::Config("not built yet".into()))
    }

    /// Where peers reach this service; goes into the membership record.
    pub fn address(&self) -> TransferAddress {
        self.shared.address.clone()
    }

    /// This instance, as tickets name it.
    pub fn party(&self) -> &Party {
        &self.shared.config.party
    }

    /// Offers a sequence to `peer`. Returns at once; connection, grant and everything after show in the outcome.
    pub fn open(&self, peer: &Peer, request: OpenRequest) -> Result<Outgoing, TransferError> {
        let (sender, outcome) = oneshot::channel();
        let key = self.shared.inbox.open(peer.clone(), request, sender)?;
        Ok(Outgoing::new(self.shared.inbox.clone(), key, outcome))
    }

    /// The process of this incarnation is proven dead (by a pidfd, or by whoever fenced its machine): its lanes are drained and closed,
    /// and what it could have written is released.
    pub fn peer_is_dead(&self, party: &Party) {
        self.shared.inbox.push(Command::PeerDead(party.clone()));
    }

    /// Counters and gauges, at most some milliseconds old.
    pub fn stats(&self) -> TransferStats {
        self.shared.stats.lock().clone()
    }

    /// Aborts what is open, waits for peers to acknowledge until `deadline`, then tears everything down.
    pub fn stop(&self, deadline: Instant) {
        self.shared.inbox.push(Command::Stop(deadline));
    }
}
