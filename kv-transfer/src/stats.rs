//! Counters of the service, as metrics and tests read them.

use crate::Party;
use baton_types::InstanceId;
use std::collections::BTreeMap;

/// Everything counted since the start, and what is live now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Over all peers, including those that are gone.
    pub total: PeerStats,
    /// Peers connected now.
    pub peers: BTreeMap<Party, PeerStats>,
    /// Puts whose source this instance is.
    pub sources: usize,
    /// Puts whose sink it is: offered here and not ended.
    pub sinks: usize,
    /// Gets whose reader it is.
    pub readers: usize,
    /// Gets whose owner it is: blocks are, or are asked to be, pinned for them here.
    pub owners: usize,
    /// Tickets granted here and not ended.
    pub tickets: usize,
    /// Numbers and tickets by which messages find handoffs: none where none is open.
    pub indexed: usize,
    /// Blocks granted here (over all groups) that are quarantined, by the instance that could still write them.
    pub quarantined: BTreeMap<InstanceId, usize>,
    /// Handoffs on the progress thread at a hold point, for tests that wait for one: see [`crate::HoldPoint`].
    pub held: usize,
}

/// Counters of one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStats {
    /// Transport and lanes, e.g. `ucx tcp/lo`.
    pub lanes: String,
    /// KV bytes written to the peer.
    pub bytes_put: u64,
    /// KV bytes adopted from the peer.
    pub bytes_adopted: u64,
    /// Writes posted.
    pub puts: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Writes refused here, because no live ticket covers them (transports that can tell).
    pub puts_refused: u64,
    /// Messages that named no live handoff.
    pub stale_messages: u64,
    /// Puts to the peer, by outcome: `adopted` or [`crate::HandoffFailure::name`].
    pub sources: BTreeMap<&'static str, u64>,
    /// Puts of the peer, by outcome.
    pub sinks: BTreeMap<&'static str, u64>,
    /// Handoffs refused here, by [`crate::RefuseReason::name`].
    pub refused: BTreeMap<&'static str, u64>,
    /// Gets from the peer, by outcome.
    pub readers: BTreeMap<&'static str, u64>,
}
