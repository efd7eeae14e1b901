//! The control messages between two services, and their encoding.
//!
//! A message is `magic u16, version u8, kind u8`, then its fields. A reader refuses another magic or version, an unknown kind, a length
//! beyond its bound, and bytes after the end. The version is that of the codec. Which messages peers may send is settled by the protocol
//! range and capability bits in [`Hello`]. A newer version's extended form of a message has a kind of its own; older peers are never sent
//! it, so they need not know it.

mod codec;
mod hello;

pub(crate) use hello::Hello;
pub use hello::RemoteRegion;

use crate::{Party, RefuseReason};
use baton_types::{BlockTables, GroupKind, KvPoolMap, RequestId, TicketId, TokenId};

/// Oldest protocol version in which a transfer may begin after position 0.
pub(crate) const PARTIAL_SINCE: u32 = 2;

/// Capability bit: takes tables that begin after position 0, and pools whose groups differ in size.
pub(crate) const TABLES: u64 = 1;

/// Capability bit: reads [`Message::Nack`] with the reasons that concern a device.
pub(crate) const DEVICE_REASONS: u64 = 2;

/// Capability bit: takes part in writes that their sink reads, and has a field for a key of reads alone at the end of its greeting. Peers
/// without it would put by such a key. They skip the field and find no key, so they send messages.
pub(crate) const READS: u64 = 4;

/// Capability bit: moves groups of states. Peers without it refuse every layout that has one. It implies [`TABLES`].
pub(crate) const STATES: u64 = 8;

/// Longest encoded message: a grant or commit of the longest sequence, with a margin.
pub(crate) const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Longest message of a peer that has not greeted: a layout of hundreds of layers, each unlike the others.
pub(crate) const GREETING_BYTES_MAX: usize = 16 << 10;

/// Minimum limit, for content that no pool's size bounds: a get's name, data that workers add to a commit, batched checksums.
const MESSAGE_BYTES_MIN: usize = 512 << 10;
/// Most bytes of a message for each token of its sequence: 4 for its id, and as many for its checksums or blocks.
const MESSAGE_BYTES_PER_TOKEN: usize = 8;

/// Longest message that a peer needs to send to the owner of this pool, which holds its sequences whole, unless no group keeps all positions.
pub(crate) fn message_bytes_max(map: &KvPoolMap) -> usize {
    let keeps_all = |kind: GroupKind| !matches!(kind, GroupKind::Window(_) | GroupKind::State);
    if !map.layout().groups().iter().any(|group| keeps_all(group.kind)) {
        return MESSAGE_BYTES_MAX;
    }
    let tokens = map.group_blocks().iter().copied().max().unwrap_or(0) as usize * map.layout().block_tokens() as usize;
    tokens.saturating_mul(MESSAGE_BYTES_PER_TOKEN).saturating_add(MESSAGE_BYTES_MIN).min(MESSAGE_BYTES_MAX)
}

/// Direction in which bytes move under a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The source writes into the sink's blocks.
    Put,
    /// The sink gets the source's blocks: it reads them one-sided, or the source writes them.
    Get,
}

/// Checksums of one layer: `sums[granule - first_granule][plane]`, flattened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SumRun {
    pub group: u8,
    /// Layer of the group, not of the model.
    pub layer: u16,
    /// Counted from position 0 of a put's sequence, and from the first position of a get.
    pub first_granule: u32,
    pub sums: Vec<u64>,
}

/// What a ticket is granted for. It names parties, never roles. The side that wants the transfer offers it: the source a put, the sink a
/// get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// The offering side's number for the handoff; it identifies the handoff until there is a ticket.
    pub handoff: u64,
    pub request_id: RequestId,
    pub source: Party,
    pub sink: Party,
    pub direction: Direction,
    /// Number of shards of the offering instance that offer the same sequence to this shard of the other, each under its own ticket.
    pub shards: u16,
    /// First position of a get; 0 for a put, where the grant specifies it.
    pub from: u32,
    pub tokens: u32,
    /// Time left. A duration, because clocks of two hosts are not compared.
    pub deadline_ms: u32,
    /// Name of the KV to get, in a form that the two workers agree on; empty for a put.
    pub name: Vec<u8>,
}

/// The end of a source's writes under a ticket. Posted only from a flush's completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit {
    pub ticket: TicketId,
    /// Algorithm of the checksums sent for this ticket, see `crate::checksum`.
    pub algorithm: u16,
    /// Total number of checksums sent for this ticket.
    pub sums: u64,
    /// Bytes written under this ticket.
    pub bytes: u64,
    pub prompt_len: u32,
    pub tokens: Vec<TokenId>,
    pub extra: Vec<u8>,
}

/// Why a sequence is not adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NackReason {
    /// The sink does not want it.
    NotAdopted,
    /// Its bytes differ from those sent.
    Corrupt,
    /// The sink's device is busy or failed: nothing is known of the bytes. Only for peers with [`DEVICE_REASONS`].
    DeviceBusy,
    Device,
}

impl NackReason {
    /// The reason as a peer with these capabilities reads it.
    pub(crate) const fn known_to(self, capabilities: u64) -> Self {
        match self {
            Self::DeviceBusy | Self::Device if capabilities & DEVICE_REASONS == 0 => Self::NotAdopted,
            reason => reason,
        }
    }
}

/// Most checksums in one message: a quarter of a mebibyte.
const SUMS_PER_MESSAGE: usize = 32 << 10;

/// Splits runs into messages of at most [`SUMS_PER_MESSAGE`] checksums; a run of one layer always fits one message.
pub(crate) fn checksum_messages(ticket: TicketId, runs: Vec<SumRun>) -> impl Iterator<Item = Message> {
    let mut messages: Vec<Vec<SumRun>> = Vec::new();
    let mut sums = usize::MAX;
    for run in runs {
        if sums.saturating_add(run.sums.len()) > SUMS_PER_MESSAGE {
            messages.push(Vec::new());
            sums = 0;
        }
        sums += run.sums.len();
        messages.last_mut().expect("pushed at the first run").push(run);
    }
    messages.into_iter().map(move |runs| Message::Checksums { ticket, runs })
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// First message of the side that connected.
    Hello(Box<Hello>),
    /// Answer to the hello.
    Welcome(Box<Hello>),
    /// The connection cannot be used.
    Reject {
        reason: RefuseReason,
        detail: String,
    },
    Offer(Box<Offer>),
    Grant {
        handoff: u64,
        ticket: TicketId,
        /// For a put: the blocks of the sequence, of a window only those that the position after it needs. For a get: the same of its
        /// positions, whose blocks count from its `from`.
        blocks: BlockTables,
        /// First position that a put moves; 0 for a get, where the offer specifies it.
        from: u32,
    },
    Refuse {
        handoff: u64,
        reason: RefuseReason,
        detail: String,
    },
    /// Checksums of bytes that earlier flushes made visible.
    Checksums {
        ticket: TicketId,
        runs: Vec<SumRun>,
    },
    Commit(Box<Commit>),
    /// The sequence is adopted.
    Ack {
        ticket: TicketId,
    },
    /// The sequence is not adopted, and never will be.
    Nack {
        ticket: TicketId,
        reason: NackReason,
        detail: String,
    },
    /// Sink: stop writing, flush, and confirm.
    Abort {
        handoff: u64,
        ticket: TicketId,
        detail: String,
    },
    /// Source: no more writes follow; `flushed` if the posted ones are known to be visible. `ticket` is 0 before a grant.
    Aborted {
        handoff: u64,
        ticket: TicketId,
        flushed: bool,
        detail: String,
    },
    /// Reader: write the pinned blocks into these blocks of mine.
    Ask {
        ticket: TicketId,
        blocks: BlockTables,
    },
    /// Reader: everything is copied; did the pin hold?
    Confirm {
        ticket: TicketId,
    },
    /// Owner: the pin held until everything was copied. This many checksums came before. Nothing of the get is in flight.
    Held {
        ticket: TicketId,
        algorithm: u16,
        sums: u64,
    },
    /// Owner: the pin did not hold, or has ended. Nothing of the get is in flight: what was written is visible.
    NotHeld {
        ticket: TicketId,
        detail: String,
    },
    /// Reader: nothing of this get is wanted any more. An owner that was asked to write answers `NotHeld`.
    Unpin {
        handoff: u64,
    },
}

impl Message {
    /// Its name, for logs. Never its contents.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Welcome(_) => "welcome",
            Self::Reject { .. } => "reject",
            Self::Offer(_) => "offer",
            Self::Grant { .. } => "grant",
            Self::Refuse { .. } => "refuse",
            Self::Checksums { .. } => "checksums",
            Self::Commit(_) => "commit",
            Self::Ack { .. } => "ack",
            Self::Nack { .. } => "nack",
            Self::Abort { .. } => "abort",
            Self::Aborted { .. } => "aborted",
            Self::Ask { .. } => "ask",
            Self::Confirm { .. } => "confirm",
            Self::Held { .. } => "held",
            Self::NotHeld { .. } => "not held",
            Self::Unpin { .. } => "unpin",
        }
    }
}

#[cfg(test)]
mod tests;
