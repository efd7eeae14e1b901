//! Errors: what failed, which side caused it, and whether a retry can help.

use crate::Party;
use baton_types::{ErrorKind, Mismatch};
use std::time::Duration;

/// The service could not start, or did not accept a handoff.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// A setting is invalid.
    #[error("transfer configuration: {0}")]
    Config(String),
    /// The transport could not start.
    #[error("cannot start the {transport} transport: {detail}")]
    Transport {
        /// Name of the transport: `ucx` or `tcp`.
        transport: &'static str,
        detail: String,
    },
    /// UCX opened nothing by which workers can be connected: no device, `self` alone, or only copies between host and device memory of this
    /// process.
    #[error(
        "no lane to any other process with UCX_TLS={tls} UCX_NET_DEVICES={devices} (opened: {opened:?}): name a lane between workers such as \
         rc, start again once its device is up, or set transfer.transport = \"tcp\""
    )]
    NoLanes {
        tls: String,
        devices: String,
        /// Transports that UCX opened.
        opened: Vec<String>,
    },
    /// UCX opened transports of which this version does not know who stores what comes by them, and when they have ended.
    #[error(
        "UCX_TLS={tls} opens {}, of which this version does not know when a lost peer can write no more: name others in transfer.ucx_tls, \
         e.g. rc, or rc,cuda_copy for GPUs",
        unknown.join(", ")
    )]
    UnknownLanes {
        tls: String,
        /// The transports.
        unknown: Vec<String>,
    },
    /// The limit of open handoffs is reached; retry later or elsewhere.
    #[error("{limit} handoffs are open already")]
    TooManyHandoffs { limit: usize },
    /// The given blocks do not hold the positions to be moved, or are not in the pool.
    #[error("blocks do not fit the handoff: {0}")]
    Blocks(String),
    /// The service was stopped.
    #[error("the transfer service is stopped")]
    Stopped,
}

/// Why a sink refuses an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefuseReason {
    /// No blocks are free, and none became free in time.
    NoRoom,
    /// No claim exists for this request: it was cancelled, or never made.
    UnknownRequest,
    /// Model, class or layout differ.
    Incompatible,
    /// The offer names another incarnation.
    WrongIncarnation,
    /// Too many blocks that this peer may write are quarantined.
    Quarantine,
    /// The instance is shutting down.
    Draining,
    /// The limit of open handoffs is reached.
    Busy,
    /// The offer breaks the protocol.
    Protocol,
    /// The peer did not prove that it is a worker of this cluster, or did not accept this instance as one.
    Unproven,
}

impl RefuseReason {
    pub(crate) const ALL: [Self; 9] = [
        Self::NoRoom,
        Self::UnknownRequest,
        Self::Incompatible,
        Self::WrongIncarnation,
        Self::Quarantine,
        Self::Draining,
        Self::Busy,
        Self::Protocol,
        Self::Unproven,
    ];

    /// Short text for messages and metric labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoRoom => "no_room",
            Self::UnknownRequest => "unknown_request",
            Self::Incompatible => "incompatible",
            Self::WrongIncarnation => "wrong_incarnation",
            Self::Quarantine => "quarantine",
            Self::Draining => "draining",
            Self::Busy => "busy",
            Self::Protocol => "protocol",
            Self::Unproven => "unproven",
        }
    }
}

/// Why a handoff failed. The sequence can be handed off again, to the same sink or another, unless the variant says otherwise.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffFailure {
    /// The two instances cannot exchange KV at all.
    #[error("{peer} cannot take this KV: {mismatch}")]
    Incompatible { peer: Party, mismatch: Mismatch },
    /// The sink refused the offer.
    #[error("refused ({}): {detail}", reason.name())]
    Refused { reason: RefuseReason, detail: String },
    /// The deadline passed in the named phase.
    #[error("the deadline passed while {0}")]
    Deadline(&'static str),
    /// This side gave up.
    #[error("aborted here: {0}")]
    Aborted(String),
    /// The other side gave up.
    #[error("aborted by the peer: {0}")]
    AbortedByPeer(String),
    /// The peer cannot be reached, or the connection to it was lost.
    #[error("peer lost: {0}")]
    PeerLost(String),
    /// The sink received bytes that differ from those sent.
    #[error("verification failed: {0}")]
    Corrupt(String),
    /// The sink verified the blocks but the worker did not adopt them.
    #[error("not adopted: {0}")]
    NotAdopted(String),
    /// The owner unpinned the blocks of a get before it ended.
    #[error("the owner let go of what was being got: {0}")]
    Unpinned(String),
    /// Part of a sequence was requested, but this pair can only move the whole: the peer's protocol is too old, or the part does not begin
    /// at a block boundary of the peer.
    #[error("only the whole can be moved: {0}")]
    WholeOnly(String),
    /// A device of one side failed: before it finished the blocks, or instead of computing their checksums.
    #[error("a device failed: {0}")]
    Device(String),
    /// The pool's device of one side had no room for the checksums in time, because others fill it. Nothing was compared.
    #[error("a device is busy: {0}")]
    DeviceBusy(String),
    /// A message that no correct peer sends.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The service was stopped.
    #[error("the transfer service was stopped")]
    Stopped,
}

impl HandoffFailure {
    /// The row of the error table that applies where this becomes a client's error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Deadline(_) => ErrorKind::DeadlineExceeded,
            Self::Aborted(_) | Self::AbortedByPeer(_) => ErrorKind::Cancelled,
            Self::Refused { reason: RefuseReason::NoRoom | RefuseReason::Busy, .. } | Self::DeviceBusy(_) => {
                ErrorKind::Overloaded
            }
            Self::Refused { .. }
            | Self::PeerLost(_)
            | Self::NotAdopted(_)
            | Self::Unpinned(_)
            | Self::WholeOnly(_)
            | Self::Stopped => ErrorKind::Unavailable,
            Self::Incompatible { .. } | Self::Corrupt(_) | Self::Device(_) | Self::Protocol(_) => ErrorKind::Internal,
        }
    }

    /// The failure as a metric label, one of a fixed set.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Incompatible { .. } => "incompatible",
            Self::Refused { .. } => "refused",
            Self::Deadline(_) => "deadline",
            Self::Aborted(_) => "aborted",
            Self::AbortedByPeer(_) => "aborted_by_peer",
            Self::PeerLost(_) => "peer_lost",
            Self::Corrupt(_) => "corrupt",
            Self::NotAdopted(_) => "not_adopted",
            Self::Unpinned(_) => "unpinned",
            Self::WholeOnly(_) => "whole_only",
            Self::Device(_) => "device",
            Self::DeviceBusy(_) => "device_busy",
            Self::Protocol(_) => "protocol",
            Self::Stopped => "stopped",
        }
    }

    /// Earliest useful retry with the same sink, where the sink reported that it is full, or a device is.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { reason: RefuseReason::NoRoom | RefuseReason::Busy, .. } | Self::DeviceBusy(_) => {
                Some(Duration::from_millis(100))
            }
            _ => None,
        }
    }
}
