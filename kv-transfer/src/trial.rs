//! Handoffs of synthetic KV between two services, to measure two hosts or compare settings. For tools that prepare hosts, and for
//! benchmarks.

use crate::{
    AdoptReply, BlockHold, CommitPayload, GrantReply, HandoffFailure, KvTransfer, Party, Peer, PutHandle, PutReport,
    PutRequest, QuarantinedBlocks, ReserveOffer, SinkHandler, TransferAddress, TransferConfig, TransferError,
    TransportChoice, VerifiedHandoff,
};
use baton_memory::{HostPool, PoolError};
use baton_types::fence::AlreadyDone;
use baton_types::{
    BlockId, BlockTables, Compatibility, Digest, Dtype, Fence, GroupBlocks, Incarnation, InstanceId, KvPoolMap,
    NumericsClass, RequestId,
};
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest life of one handoff.
const HANDOFF_MAX: Duration = Duration::from_secs(60);

/// A transfer service with its own pool. It grants every other one of its blocks to any peer that offers a handoff: scattered, so that no
/// two writes merge.
pub struct Trial {
    transfer: KvTransfer,
    map: KvPoolMap,
    opened: u64,
}

/// A region whose pages are all present, so that page faults are not measured.
///
/// # Errors
/// If the memory cannot be allocated.
pub fn touched(bytes: usize) -> Result<Arc<HostPool>, PoolError> {
    let region = HostPool::new(bytes)?;
    (0..region.bytes()).step_by(4096).for_each(|at| region.copy_in(at, &[1]));
    Ok(region)
}

/// A handoff that the sink acknowledged.
#[derive(Clone, Debug)]
pub struct Moved {
    /// Report of the source.
    pub report: PutReport,
    /// Time from the offer to the acknowledgement.
    pub took: Duration,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl Trial {
    /// Configuration of a service that matches every other service of a trial with the same pool.
    pub fn config(name: InstanceId, transport: TransportChoice, map: KvPoolMap) -> TransferConfig {
        let class =
            NumericsClass { order: "trial".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
        let compatibility = Compatibility { model: Digest([0; 32]), layout: map.layout().clone(), class };
        TransferConfig::new(Self::party(name), compatibility, map, transport)
    }

    const fn party(name: InstanceId) -> Party {
        Party { instance: name, incarnation: Incarnation(1) }
    }

    /// Starts the service over [`touched`] memory.
    ///
    /// # Errors
    /// If memory, devices or addresses are unavailable.
    pub fn start(config: TransferConfig) -> Result<Self, TrialError> {
        let map = config.map.clone();
        let transfer = KvTransfer::start(config, touched(map.bytes())?, Arc::new(Sink(map.clone())))?;
        Ok(Self { transfer, map, opened: 0 })
    }

    /// The address for the other side.
    pub fn address(&self) -> TransferAddress {
        self.transfer.address()
    }

    /// The peer of this name at this address.
    pub const fn peer(name: InstanceId, address: TransferAddress) -> Peer {
        Peer { party: Self::party(name), address, shard: 0 }
    }

    /// Tokens that one handoff can carry.
    pub fn tokens_max(&self) -> u32 {
        self.map.blocks(0) / 2 * self.map.layout().block_tokens()
    }

    pub const fn transfer(&self) -> &KvTransfer {
        &self.transfer
    }

    /// Offers a handoff of `tokens` tokens.
    ///
    /// # Errors
    /// If the service accepts no more.
    pub fn open(&mut self, peer: &Peer, tokens: u32) -> Result<PutHandle, TransferError> {
        self.opened += 1;
        let request_id = RequestId::try_new(format!("trial-{}", self.opened));
        let request = PutRequest {
            request_id: request_id.map_err(|e| TransferError::Config(e.to_string()))?,
            tokens,
            blocks: scattered(&self.map),
            deadline: Instant::now() + HANDOFF_MAX,
            hold: Box::new(()),
        };
        self.transfer.put(peer, request)
    }

    /// Hands everything that the pools hold to `peer`, with all layers ready at once, and waits for the acknowledgement.
    ///
    /// # Errors
    /// Why the handoff failed, or could not be offered.
    pub fn hand_off(&mut self, peer: &Peer) -> Result<Moved, TrialError> {
        let (began, tokens) = (Instant::now(), self.tokens_max());
        let put = self.open(peer, tokens)?;
        let fence: Fence = Arc::new(AlreadyDone);
        let layers = self.map.layout().groups()[0].layers.len() as u32;
        (0..layers).for_each(|layer| put.layer_launched(layer, tokens as usize, &fence));
        finish(&put, tokens);
        let report = put.wait()?;
        Ok(Moved { took: report.acked_at - began, report })
    }

    /// Stops the service, within two seconds.
    pub fn stop(self) {
        self.transfer.stop(Instant::now() + Duration::from_secs(2));
    }
}

/// Ends a trial's handoff of `tokens` tokens.
pub fn finish(put: &PutHandle, tokens: u32) {
    put.finish(CommitPayload { tokens: vec![0; tokens as usize + 1], prompt_len: tokens, extra: vec![] });
}

/// Why a trial failed.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The pool's memory cannot be allocated.
    #[error("cannot have the memory of the pool")]
    Memory(#[from] PoolError),
    /// The service could not start, or could not offer.
    #[error(transparent)]
    Service(#[from] TransferError),
    #[error("the handoff failed: {0}")]
    Failed(#[from] HandoffFailure),
}

fn scattered(map: &KvPoolMap) -> BlockTables {
    BlockTables::from_start(GroupBlocks(vec![(0..map.blocks(0)).step_by(2).map(BlockId).collect()]))
}

pub(crate) struct Hold(pub(crate) BlockTables);

impl BlockHold for Hold {
    fn blocks(&self) -> &BlockTables {
        &self.0
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        self
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl QuarantinedBlocks for Hold {
    fn release(self: Box<Self>) {}
}

struct Sink(KvPoolMap);

impl SinkHandler for Sink {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.grant(Box::new(Hold(scattered(&self.0))));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, reason: HandoffFailure) {
        tracing::warn!(%reason, "a trial's handoff failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::KvLayout;

    #[test]
    fn a_handoff_fills_what_the_pools_hold() {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap(), 10).unwrap();
        let start = |name: &str| {
            let transport = TransportChoice::Tcp { bind: [127, 0, 0, 1].into(), port: 0 };
            Trial::start(Trial::config(InstanceId::try_new(name).unwrap(), transport, map.clone())).unwrap()
        };
        let (mut source, sink) = (start("source"), start("sink"));
        let peer = Trial::peer(InstanceId::try_new("sink").unwrap(), sink.address());
        // Every other of ten blocks.
        assert_eq!((source.tokens_max(), sink.tokens_max()), (80, 80));
        let moved = source.hand_off(&peer).unwrap();
        assert_eq!(moved.report.bytes, (map.bytes() / 2) as u64);
        [source, sink].into_iter().for_each(Trial::stop);
    }
}
