//! Configuration of a transfer service.

use crate::{Credentials, HeadShard, NoHooks, TransferAddress, TransferError, TransferHooks};
use baton_types::{Compatibility, KvPoolMap, MemoryKind, Party, ProtocolRange};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// A peer to hand a sequence to, as membership reports it.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The instance in the incarnation that the record names. An answer from another incarnation is an error.
    pub party: Party,
    pub address: TransferAddress,
    /// Index of the peer's shard.
    pub shard: u16,
}

/// Transport that carries the data plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    /// UCX: RDMA between hosts, shared memory within one. Connections are opened, and control messages sent, over TCP.
    Ucx {
        /// Lanes that carry writes.
        lanes: UcxLanes,
        /// Address to listen on for connections, as with [`TransportChoice::Tcp`].
        bind: IpAddr,
        /// Port to listen on; 0 lets the system choose.
        port: u16,
        /// `UCX_NET_DEVICES`, e.g. `mlx5_0:1`: RDMA devices are not found by an address. `None` uses all of them.
        devices: Option<String>,
        /// How this side writes into its peers' regions.
        writes: UcxWrites,
    },
    /// Our own TCP transport, for hosts without RDMA.
    Tcp {
        /// Address to listen on. It is also published, unless [`TransferConfig::advertise`] overrides it.
        bind: IpAddr,
        /// Port to listen on; 0 lets the system choose.
        port: u16,
    },
}

/// How a UCX connection writes. Each side chooses for its own writes; every sink accepts both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UcxWrites {
    /// One-sided where the lanes write without the peer's processor; messages where UCX would emulate one-sided writes.
    #[default]
    ByLanes,
    /// UCX puts on every lane, for tests and comparisons. Over TCP the peer must acknowledge each put, and UCX 1.22 aborts its process if
    /// the peer is gone by then.
    OneSided,
    /// The sink reads on every lane, as it does from memory of a GPU over `dc`, for tests. Over TCP UCX emulates that too.
    Read,
}

impl TransportChoice {
    /// UCX with these lanes, reached at this address.
    pub const fn ucx(lanes: UcxLanes, bind: IpAddr) -> Self {
        Self::Ucx { lanes, bind, port: 0, devices: None, writes: UcxWrites::ByLanes }
    }

    /// TCP, reached at this address.
    pub const fn tcp(bind: IpAddr) -> Self {
        Self::Tcp { bind, port: 0 }
    }
}

/// Lanes over which UCX writes. TCP is allowed in tests only: over TCP, UCX stores what any client writes to any address, before it asks
/// this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UcxLanes {
    /// RDMA over InfiniBand or RoCE: those of UCX's alias `ib` whose fences are known.
    Rdma,
    /// UCX's shared memory, between processes of one host. Every process that may use it may also read the memory of the other processes.
    SharedMemory,
    /// As in `UCX_TLS`, e.g. `rc,cuda_copy`; refused where it resolves to TCP. Where a peer writes memory directly (CMA, xpmem, `cuda_ipc`),
    /// its writes cannot be fenced. `cuda` is `cuda_copy`, `gdr_copy` and `cuda_ipc`.
    Named(String),
    /// TCP, for tests; refused for addresses other than loopback.
    LoopbackTcp,
}

impl UcxLanes {
    /// The value of `UCX_TLS` that selects these lanes.
    pub fn tls(&self) -> &str {
        match self {
            Self::Rdma => "rc,dc,ud",
            Self::SharedMemory => "posix,sysv,self",
            Self::Named(tls) => tls,
            Self::LoopbackTcp => "tcp",
        }
    }

    /// The same for a pool of this kind. A NIC moves memory of a GPU by puts over `rc` alone, and UCX knows it by `cuda_copy`.
    pub(crate) fn tls_for(&self, pool: MemoryKind) -> &str {
        match (self, pool) {
            (Self::Rdma, MemoryKind::Cuda(_)) => "rc,cuda_copy",
            _ => self.tls(),
        }
    }
}

/// Bounds of the service: every queue, wait and reservation has one. Deserialized from configuration files without conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransferLimits {
    /// Handoffs that this instance may have begun and not ended: puts as their source, gets as their reader.
    pub started_handoffs_max: usize,
    /// Puts that peers may have open here, granted or not, and as many gets. Those whose blocks are quarantined have ended and do not count.
    /// One peer may have half of them, or 16 if that is more.
    pub accepted_handoffs_max: usize,
    /// Open connections that this instance opened to peers. With those that have ended, and for which only the pool's device still works,
    /// there are at most twice as many.
    pub peers_max: usize,
    /// The same of connections that peers opened to this instance. They do not count towards `peers_max`. One peer may have an eighth of them,
    /// or 16 if that is more.
    pub accepted_max: usize,
    /// Connections whose peer has not sent its greeting. One more closes the oldest, so that a silent client cannot keep others out.
    pub ungreeted_max: usize,
    /// Bytes posted to one peer whose writes have not completed.
    pub in_flight_bytes_max: usize,
    /// Largest single write; longer runs are split.
    pub put_bytes_max: usize,
    /// Bytes of one handoff after which it requests a flush (an epoch) and sends the checksums of what it covers.
    pub epoch_bytes: usize,
    /// Most blocks, over all groups and incarnations, that one peer may leave in quarantine on lanes without a fence. It is not granted
    /// more at once; 0 means a quarter of the pool. On any lane, a peer with blocks in quarantine is granted none.
    pub quarantined_blocks_max: usize,
    /// Longest wait for the answer to a connection attempt.
    pub connect_ms: u64,
    /// Longest wait for a peer to acknowledge an abort, after which its blocks are quarantined.
    pub abort_ms: u64,
    /// Longest wait for the posted writes of an abandoned handoff to reach a peer. Then the connection is closed, because those writes read
    /// blocks of this instance.
    pub flush_ms: u64,
    /// Silence after which a peer is taken for lost.
    pub peer_silent_ms: u64,
    /// Idle time after which a connection is closed. A handoff that is offered at that moment fails, retryably.
    pub idle_ms: u64,
    /// Longest time for which blocks stay pinned for a peer that gets them.
    pub pin_ms: u64,
    /// Longest life of a handoff; later deadlines are shortened to it.
    pub handoff_ms: u64,
    /// How long the progress thread polls for work before it sleeps, in microseconds.
    pub spin_us: u64,
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self {
            started_handoffs_max: 1024,
            accepted_handoffs_max: 1024,
            peers_max: 256,
            accepted_max: 512,
            ungreeted_max: 64,
            in_flight_bytes_max: 32 << 20,
            put_bytes_max: 4 << 20,
            epoch_bytes: 4 << 20,
            quarantined_blocks_max: 0,
            connect_ms: 5_000,
            abort_ms: 2_000,
            flush_ms: 1_500,
            peer_silent_ms: 10_000,
            idle_ms: 600_000,
            pin_ms: 30_000,
            handoff_ms: 600_000,
            spin_us: 20,
        }
    }
}

impl TransferLimits {
    /// Refuses a limit with which the service could not work.
    pub fn check(&self) -> Result<(), TransferError> {
        let positive = [
            ("started_handoffs_max", self.started_handoffs_max),
            ("accepted_handoffs_max", self.accepted_handoffs_max),
            ("peers_max", self.peers_max),
            ("accepted_max", self.accepted_max),
            ("ungreeted_max", self.ungreeted_max),
            ("in_flight_bytes_max", self.in_flight_bytes_max),
            ("put_bytes_max", self.put_bytes_max),
            ("epoch_bytes", self.epoch_bytes),
            ("connect_ms", self.connect_ms as usize),
            ("abort_ms", self.abort_ms as usize),
            ("flush_ms", self.flush_ms as usize),
            ("peer_silent_ms", self.peer_silent_ms as usize),
            ("idle_ms", self.idle_ms as usize),
            ("pin_ms", self.pin_ms as usize),
            ("handoff_ms", self.handoff_ms as usize),
        ];
        match positive.iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(TransferError::Config(format!("{name} must be at least 1"))),
            None if self.put_bytes_max > u32::MAX as usize => {
                Err(TransferError::Config("put_bytes_max must be below 4 GiB".into()))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn flush(&self) -> Duration {
        Duration::from_millis(self.flush_ms)
    }

    pub(crate) fn abort(&self) -> Duration {
        Duration::from_millis(self.abort_ms)
    }

    /// [`TransferLimits::quarantined_blocks_max`] of a pool.
    pub(crate) fn quarantined_blocks_of(&self, map: &KvPoolMap) -> usize {
        match self.quarantined_blocks_max {
            0 => (map.total_blocks() / 4).max(1),
            max => max,
        }
    }
}

/// What [`crate::KvTransfer::start`] needs to know.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone)]
pub struct TransferConfig {
    pub party: Party,
    /// Compared with each peer's before any byte moves. Its layout is that of the whole instance.
    pub compatibility: Compatibility,
    /// Protocol versions of this side; peers that share none of them are refused before any byte moves.
    pub protocol: ProtocolRange,
    /// The shard of the instance whose KV this service moves.
    pub shard: HeadShard,
    /// The pool in the region: the shard's part of the layout.
    pub map: KvPoolMap,
    /// Transport of the data plane.
    pub transport: TransportChoice,
    pub limits: TransferLimits,
    /// Host to publish in place of the bound address, where they differ.
    pub advertise: Option<IpAddr>,
    /// With credentials, every connection runs in TLS 1.3 and only workers of the same authority are accepted. Without them, the identity
    /// that a client of the data plane claims is not verified: for tests, and for networks that only this cluster can use.
    pub credentials: Option<Arc<dyn Credentials>>,
    /// With credentials: whether KV bytes are encrypted too. Otherwise peers still authenticate and messages are still encrypted. Set it
    /// alike on every instance.
    pub encrypt: bool,
    /// Hooks through which tests control the service.
    pub hooks: Arc<dyn TransferHooks>,
    /// Guards that tests leave out.
    #[cfg(any(test, feature = "testing"))]
    pub hazards: crate::Hazards,
}

impl TransferConfig {
    /// Configuration of an instance with one shard, with default limits and no hooks.
    pub fn new(party: Party, compatibility: Compatibility, map: KvPoolMap, transport: TransportChoice) -> Self {
        let (protocol, shard) = (ProtocolRange::CURRENT, HeadShard::WHOLE);
        let (limits, hooks) = (TransferLimits::default(), Arc::new(NoHooks));
        Self {
            party,
            compatibility,
            protocol,
            shard,
            map,
            transport,
            limits,
            advertise: None,
            credentials: None,
            encrypt: true,
            hooks,
            #[cfg(any(test, feature = "testing"))]
            hazards: crate::Hazards::default(),
        }
    }
}

impl fmt::Debug for TransferConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferConfig")
            .field("party", &self.party)
            .field("transport", &self.transport)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_of_any_gpu_ask_for_what_knows_their_memory() {
        for ordinal in [0, 1, 7] {
            assert_eq!(UcxLanes::Rdma.tls_for(MemoryKind::Cuda(ordinal)), "rc,cuda_copy");
        }
        for pool in [MemoryKind::Host, MemoryKind::Remote] {
            assert_eq!(UcxLanes::Rdma.tls_for(pool), "rc,dc,ud");
        }
        assert_eq!(UcxLanes::Named("rc".into()).tls_for(MemoryKind::Cuda(0)), "rc", "as it was named");
    }
}
