//! What a transfer service is started with.

use crate::{Credentials, HeadShard, NoHooks, TransferAddress, TransferError, TransferHooks};
use baton_types::{Compatibility, KvPoolMap, Party, ProtocolRange};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Whom to hand a sequence to, as membership tells it.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The instance, in the incarnation that the record names. Another one answering there is an error.
    pub party: Party,
    pub address: TransferAddress,
    /// Which of its shards that is.
    pub shard: u16,
}

/// Which transport carries the data plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    /// UCX: RDMA between hosts, shared memory within one. Connections are made, and messages go, over TCP all the same.
    Ucx {
        /// What writes go over.
        lanes: UcxLanes,
        /// Address to listen on for connections, as with [`TransportChoice::Tcp`].
        bind: IpAddr,
        /// Port to listen on; 0 lets the system choose.
        port: u16,
        /// `UCX_NET_DEVICES`, e.g. `mlx5_0:1`: RDMA devices are not found by an address. All where absent.
        devices: Option<String>,
        /// How this side writes into its peers' regions.
        writes: UcxWrites,
    },
    /// TCP of our own, wherever there is no RDMA.
    Tcp {
        /// Address to listen on, which is also the one published unless [`TransferConfig::advertise`] says otherwise.
        bind: IpAddr,
        /// Port to listen on; 0 lets the system choose.
        port: u16,
    },
}

/// How a UCX connection writes. Each side chooses for its own writes; every sink takes both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UcxWrites {
    /// One-sided where the lanes write without the peer's processor, by messages where UCX would emulate that.
    #[default]
    ByLanes,
    /// UCX's puts everywhere, for tests and comparisons: over TCP the peer has to acknowledge each, and UCX 1.22 aborts its process if
    /// this one is gone by then.
    OneSided,
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

/// What UCX carries writes over. Never TCP, but in tests: over it UCX stores what anybody writes, wherever that says, before we are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UcxLanes {
    /// InfiniBand and RoCE.
    Rdma,
    /// Shared memory that UCX makes for itself: between processes of one host. Everybody who may use it may also read the memory of the
    /// processes themselves.
    SharedMemory,
    /// As in `UCX_TLS`, e.g. `rc,cuda_copy`; refused where that comes to TCP. Where a peer writes memory by itself (CMA, xpmem) nothing
    /// fences it.
    Named(String),
    /// TCP, refused off loopback: for tests.
    LoopbackTcp,
}

impl UcxLanes {
    /// `UCX_TLS`.
    pub fn tls(&self) -> &str {
        match self {
            Self::Rdma => "ib",
            Self::SharedMemory => "posix,sysv,self",
            Self::Named(tls) => tls,
            Self::LoopbackTcp => "tcp",
        }
    }
}

/// Bounds of the service. Every queue, wait and reservation has one. Read from configuration files as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransferLimits {
    /// Handoffs that this instance may begin at once: puts as their source, gets as their reader.
    pub begun_max: usize,
    /// Puts, and gets, that peers may begin here at once, granted or not. Those whose blocks are quarantined are over and do not count.
    pub offered_max: usize,
    /// Peers that this instance is connected to at once, because it opened the connection.
    pub peers_max: usize,
    /// Peers that are connected to this instance at once, because they did. They take none of the places of `peers_max`.
    pub accepted_max: usize,
    /// Connections at once whose peer has not greeted. With one more the oldest is closed, so that whoever says nothing keeps nobody out.
    pub ungreeted_max: usize,
    /// Bytes posted to one peer and not completed.
    pub in_flight_bytes_max: usize,
    /// Largest single write; longer runs are cut.
    pub put_bytes_max: usize,
    /// Bytes of one handoff after which a flush epoch is asked for and its checksums are sent ahead.
    pub epoch_bytes: usize,
    /// Most blocks, over all groups, that a peer may come to leave in quarantine on lanes that nothing fences, in all its incarnations: it
    /// is granted no more at once; 0 takes a quarter of the pool. On any lane, a peer with blocks in quarantine is granted none.
    pub quarantined_blocks_max: usize,
    /// Longest wait for a connection to answer.
    pub connect_ms: u64,
    /// Longest wait for a peer to acknowledge an abort, after which its blocks are quarantined.
    pub abort_ms: u64,
    /// Longest wait for writes of a handoff that was given up to reach a peer, after which their connection is closed: until then they
    /// read blocks of this instance.
    pub flush_ms: u64,
    /// Silence after which a peer counts as gone.
    pub peer_silent_ms: u64,
    /// How long a connection may carry nothing before it is let go. A handoff that is offered at that very moment fails, retryably.
    pub idle_ms: u64,
    /// Longest time for which blocks are pinned for a peer that gets them.
    pub pin_ms: u64,
    /// Longest life of a handoff, whatever deadline is asked for.
    pub handoff_ms: u64,
    /// How long the progress thread looks for work before it sleeps, in microseconds.
    pub spin_us: u64,
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self {
            begun_max: 1024,
            offered_max: 1024,
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
    /// Refuses a limit that would stop everything.
    pub fn check(&self) -> Result<(), TransferError> {
        let positive = [
            ("begun_max", self.begun_max),
            ("offered_max", self.offered_max),
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
            0 => (map.blocks() as usize * map.layout().groups().len() / 4).max(1),
            max => max,
        }
    }
}

/// Everything that [`crate::KvTransfer::start`] needs.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone)]
pub struct TransferConfig {
    pub party: Party,
    /// Compared with each peer's before the first byte. Its layout is that of the whole instance.
    pub compatibility: Compatibility,
    /// Versions spoken; peers that speak none of them are refused before the first byte.
    pub protocol: ProtocolRange,
    /// Which of the instance's shards this service moves KV of.
    pub shard: HeadShard,
    /// The pool that the region holds: the shard's part of the layout.
    pub map: KvPoolMap,
    /// Transport of the data plane.
    pub transport: TransportChoice,
    pub limits: TransferLimits,
    /// Host to publish in place of the bound address, where the two differ.
    pub advertise: Option<IpAddr>,
    /// With these, every connection runs in TLS 1.3, and only workers of the same authority are talked to. Without, anybody who reaches the
    /// data plane is believed to be whom it says: for tests, and networks on which only this cluster speaks.
    pub credentials: Option<Arc<dyn Credentials>>,
    /// With credentials: whether the bytes of KV are encrypted too. Where they are not, peers prove themselves and messages are encrypted all
    /// the same. To be set alike everywhere.
    pub encrypt: bool,
    /// Where tests take hold of the service.
    pub hooks: Arc<dyn TransferHooks>,
    /// Guards that tests leave out.
    #[cfg(any(test, feature = "testing"))]
    pub hazards: crate::Hazards,
}

impl TransferConfig {
    /// A configuration of an instance's only shard, with default limits and no hooks.
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
