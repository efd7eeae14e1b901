//! The control messages between two services, and their bytes.
//!
//! A message is `magic u16, version u8, kind u8`, then its fields. A reader refuses another magic or version, an unknown kind, a
//! length beyond its bound and bytes after the end. The version is that of the codec; what peers may say to each other is settled
//! by the protocol range and capability bits in [`Hello`]. What a newer version adds to a message has a kind of its own, so that older
//! peers, which are never sent it, need not know its form.

mod codec;
mod hello;

pub(crate) use hello::Hello;
pub use hello::RemoteRegion;

use crate::{Party, RefuseReason};
use baton_types::{GroupBlocks, KvPoolMap, RequestId, TicketId, TokenId};

/// Oldest protocol version in which what is moved may begin behind position 0.
pub(crate) const PARTIAL_SINCE: u32 = 2;

/// Longest encoded message: a grant or commit of the longest sequence, with room to spare.
pub(crate) const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Longest message of a peer that has not greeted: a layout of hundreds of layers, each unlike the others.
pub(crate) const GREETING_BYTES_MAX: usize = 16 << 10;

/// What every message may hold that no pool's size bounds: a get's name, what workers add to a commit, checksums that are sent together.
const MESSAGE_BYTES_MIN: usize = 512 << 10;
/// Most bytes of a message for each token of the sequence that it is about: 4 of its id, and as many of its checksums or blocks.
const MESSAGE_BYTES_PER_TOKEN: usize = 8;

/// Longest message that a peer has to send to the owner of this pool, whose sequences it holds whole.
pub(crate) fn message_bytes_max(map: &KvPoolMap) -> usize {
    let tokens = map.blocks() as usize * map.layout().block_tokens() as usize;
    tokens.saturating_mul(MESSAGE_BYTES_PER_TOKEN).saturating_add(MESSAGE_BYTES_MIN).min(MESSAGE_BYTES_MAX)
}

/// Which way bytes flow under a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The source writes into the sink's blocks.
    Put,
    /// The sink gets the source's blocks: by itself, or written by the source.
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

/// What a ticket stands for. Parties, never roles. Whoever wants something of the other offers: the source a put, the sink a get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// The offering side's number for the handoff; names it until there is a ticket.
    pub handoff: u64,
    pub request_id: RequestId,
    pub source: Party,
    pub sink: Party,
    pub direction: Direction,
    /// Shards of the offering instance that offer the same to this shard of the other, each under a ticket of its own.
    pub shards: u16,
    /// First position of a get; 0 for a put, where the grant says it.
    pub from: u32,
    pub tokens: u32,
    /// Time left; clocks are not compared.
    pub deadline_ms: u32,
    /// What a get is of, in terms of the two workers; empty for a put.
    pub name: Vec<u8>,
}

/// The end of a source's writing under a ticket. Posted only from a flush's completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit {
    pub ticket: TicketId,
    /// Of the checksums sent for this ticket, see `crate::checksum`.
    pub algorithm: u16,
    /// Checksums sent for this ticket in all.
    pub sums: u64,
    /// Bytes written under this ticket.
    pub bytes: u64,
    pub prompt_len: u32,
    pub tokens: Vec<TokenId>,
    pub extra: Vec<u8>,
}

/// Most checksums in one message: a quarter of a mebibyte.
const SUMS_PER_MESSAGE: usize = 32 << 10;

/// Cuts runs into messages of at most [`SUMS_PER_MESSAGE`] checksums; a run of one layer is never longer than a message may be.
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
    /// First message of whoever connected.
    Hello(Box<Hello>),
    /// Answer to it.
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
        /// Of a put: all blocks of the sequence. Of a get: those from its `from` on.
        blocks: GroupBlocks,
        /// First position that a put moves; 0 for a get, where the offer says it.
        from: u32,
    },
    Refuse {
        handoff: u64,
        reason: RefuseReason,
        detail: String,
    },
    /// Checksums of what earlier flushes made visible.
    Checksums {
        ticket: TicketId,
        runs: Vec<SumRun>,
    },
    Commit(Box<Commit>),
    /// The sequence is adopted.
    Ack {
        ticket: TicketId,
    },
    /// It is not, and never will be.
    Nack {
        ticket: TicketId,
        corrupt: bool,
        detail: String,
    },
    /// Sink: stop writing, flush, and say so.
    Abort {
        handoff: u64,
        ticket: TicketId,
        detail: String,
    },
    /// Source: no more writes come; `flushed` if those posted are known to be visible. `ticket` is 0 before a grant.
    Aborted {
        handoff: u64,
        ticket: TicketId,
        flushed: bool,
        detail: String,
    },
    /// Reader: write what is pinned into these blocks of mine.
    Ask {
        ticket: TicketId,
        blocks: GroupBlocks,
    },
    /// Reader: I have got everything; did the pin hold?
    Confirm {
        ticket: TicketId,
    },
    /// Owner: it did, until everything was got. So many checksums came before this. Nothing of the get is under way.
    Held {
        ticket: TicketId,
        algorithm: u16,
        sums: u64,
    },
    /// Owner: it did not, or does no longer. Nothing of the get is under way: what was written is visible.
    NotHeld {
        ticket: TicketId,
        detail: String,
    },
    /// Reader: nothing of this get is wanted any more. One that was asked to write answers `NotHeld`.
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
