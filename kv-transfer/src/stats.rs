//! Counters of the service, for metrics and tests.

use crate::Party;
use baton_types::InstanceId;
use std::collections::BTreeMap;

/// Counts since the start, and gauges of what is open now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Over all peers, including disconnected ones.
    pub total: PeerStats,
    /// Counters of the peers that are connected now.
    pub peers: BTreeMap<Party, PeerStats>,
    /// Puts whose source this instance is.
    pub sources: usize,
    /// Puts whose sink this instance is: offered here and not ended.
    pub sinks: usize,
    /// Gets whose reader this instance is.
    pub readers: usize,
    /// Gets whose owner this instance is: blocks are pinned here, or the worker was asked to pin them.
    pub owners: usize,
    /// Tickets granted here and not ended.
    pub tickets: usize,
    /// Numbers and tickets by which messages find handoffs; 0 when no handoff is open.
    pub indexed: usize,
    /// Blocks granted here (over all groups) that are quarantined, by the instance that could still write them, or whose last writes the
    /// pool's device still stores.
    pub quarantined: BTreeMap<InstanceId, usize>,
    /// Handoffs on the progress thread that wait at a hold point, for tests: see [`crate::HoldPoint`].
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
    /// Number of writes posted.
    pub puts: u64,
    /// Number of flushes completed.
    pub flushes: u64,
    /// Writes refused here because no live ticket covers them (on transports that can detect it).
    pub puts_refused: u64,
    /// Messages that did not name a live handoff.
    pub stale_messages: u64,
    /// Puts to the peer, by outcome: `adopted` or [`crate::HandoffFailure::name`].
    pub sources: BTreeMap<&'static str, u64>,
    /// Puts from the peer, by outcome.
    pub sinks: BTreeMap<&'static str, u64>,
    /// Handoffs refused here, by [`crate::RefuseReason::name`].
    pub refused: BTreeMap<&'static str, u64>,
    /// Gets from the peer, by outcome.
    pub readers: BTreeMap<&'static str, u64>,
}
