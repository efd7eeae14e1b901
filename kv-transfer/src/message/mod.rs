//! The control messages between two services, and their bytes.
//!
//! A message is `magic u16, version u8, kind u8`, then its fields. A reader refuses another magic or version, an unknown kind, a
//! length beyond its bound and bytes after the end. The version is that of the codec; what peers may say to each other is settled
//! by the protocol range and capability bits in [`Hello`].

mod codec;
mod hello;

pub(crate) use hello::{Hello, RemoteRegion};

use crate::{Party, RefuseReason};
use baton_types::{GroupBlocks, RequestId, TicketId, TokenId};

/// Longest encoded message: a grant or commit of the longest sequence, with room to spare.
pub(crate) const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Which way bytes flow under a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The source writes into the sink's blocks.
    Put,
    /// The sink reads the source's blocks. Named so that tickets can say it; no service computes it yet.
    Get,
}

/// Which shard of the source writes to which shard of the sink. One shard an instance is what is computed now: `0 -> 0` of 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ShardPair {
    pub source: u16,
    pub sink: u16,
}

/// Checksums of one layer: `sums[granule - first_granule][plane]`, flattened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumRun {
    pub group: u8,
    /// Layer of the group, not of the model.
    pub layer: u16,
    pub first_granule: u32,
    pub sums: Vec<u64>,
}

/// What a ticket stands for. Parties, never roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Source's number for the handoff; names it until there is a ticket.
    pub handoff: u64,
    pub request_id: RequestId,
    pub source: Party,
    pub sink: Party,
    pub direction: Direction,
    /// Shards of the source that will commit.
    pub shards: u16,
    pub tokens: u32,
    /// Time left; clocks are not compared.
    pub deadline_ms: u32,
}

/// The end of a source's writing under a ticket. Posted only from a flush's completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    pub ticket: TicketId,
    pub shard: ShardPair,
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
        shard: ShardPair,
        blocks: GroupBlocks,
    },
    Refuse {
        handoff: u64,
        reason: RefuseReason,
        detail: String,
    },
    /// Checksums of what earlier flushes made visible.
    Checksums {
        ticket: TicketId,
        shard: ShardPair,
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
}
