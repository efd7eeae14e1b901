//! Encoding and decoding of the control messages.

use super::hello::{read_party, write_party};
use super::{Commit, Direction, Hello, MESSAGE_BYTES_MAX, Message, NackReason, Offer, SumRun};
use crate::wire::{Reader, WireError, Writer};
use crate::{CommitPayload, GetRequest, RefuseReason};
use baton_types::{BlockId, BlockTable, BlockTables, RequestId, TicketId};

const MAGIC: u16 = 0x4b42; // "BK"
const VERSION: u8 = 1;
/// Longest text in a message; longer ones are truncated when written.
const DETAIL_BYTES_MAX: usize = 1024;
/// Most blocks of one group in a grant: the longest sequence in the smallest blocks.
const BLOCKS_MAX: usize = CommitPayload::TOKENS_MAX / 16;
const RUNS_MAX: usize = 1 << 16;
const SUMS_MAX: usize = 1 << 20;

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u16(MAGIC);
        w.u8(VERSION);
        w.u8(self.kind());
        match self {
            Self::Hello(hello) | Self::Welcome(hello) => hello.write(&mut w),
            Self::Reject { reason, detail } => {
                w.u8(reason_code(*reason));
                write_detail(&mut w, detail);
            }
            Self::Offer(offer) => {
                write_from(&mut w, offer.from);
                write_offer(&mut w, offer);
            }
            Self::Grant { handoff, ticket, blocks, from } => {
                if begins_late(blocks) {
                    w.u32(*from);
                } else {
                    write_from(&mut w, *from);
                }
                w.u64(*handoff);
                w.u64(ticket.0);
                write_blocks(&mut w, blocks);
            }
            Self::Refuse { handoff, reason, detail } => {
                w.u64(*handoff);
                w.u8(reason_code(*reason));
                write_detail(&mut w, detail);
            }
            Self::Checksums { ticket, runs } => {
                w.u64(ticket.0);
                w.list(runs, |w, run| {
                    w.u8(run.group);
                    w.u16(run.layer);
                    w.u32(run.first_granule);
                    w.list(&run.sums, |w, sum| w.u64(*sum));
                });
            }
            Self::Commit(commit) => write_commit(&mut w, commit),
            Self::Ack { ticket } => w.u64(ticket.0),
            Self::Nack { ticket, reason, detail } => {
                w.u64(ticket.0);
                w.u8(match reason {
                    NackReason::NotAdopted | NackReason::DeviceBusy => 0,
                    NackReason::Corrupt | NackReason::Device => 1,
                });
                write_detail(&mut w, detail);
            }
            Self::Abort { handoff, ticket, detail } => {
                w.u64(*handoff);
                w.u64(ticket.0);
                write_detail(&mut w, detail);
            }
            Self::Aborted { handoff, ticket, flushed, detail } => {
                w.u64(*handoff);
                w.u64(ticket.0);
                w.u8(u8::from(*flushed));
                write_detail(&mut w, detail);
            }
            Self::Ask { ticket, blocks } => {
                w.u64(ticket.0);
                write_blocks(&mut w, blocks);
            }
            Self::Confirm { ticket } => w.u64(ticket.0),
            Self::Held { ticket, algorithm, sums } => {
                w.u64(ticket.0);
                w.u16(*algorithm);
                w.u64(*sums);
            }
            Self::NotHeld { ticket, detail } => {
                w.u64(ticket.0);
                write_detail(&mut w, detail);
            }
            Self::Unpin { handoff } => w.u64(*handoff),
        }
        w.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(WireError::new("the message", "is longer than allowed"));
        }
        let mut r = Reader::new(bytes);
        if r.u16("magic")? != MAGIC || r.u8("version")? != VERSION {
            return Err(WireError::new("the message", "is of another protocol"));
        }
        let kind = r.u8("kind")?;
        let message = Self::read(kind, &mut r)?;
        // A greeting may come from a newer version, which appends fields that older ones skip. It must be readable so that the version
        // ranges can be compared.
        if !matches!(message, Self::Hello(_) | Self::Welcome(_) | Self::Reject { .. }) {
            r.end()?;
        }
        Ok(message)
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => 1,
            Self::Welcome(_) => 2,
            Self::Reject { .. } => 3,
            Self::Offer(offer) if offer.from > 0 => 19,
            Self::Offer(_) => 4,
            Self::Grant { blocks, .. } if begins_late(blocks) => 20,
            Self::Grant { from, .. } if *from > 0 => 18,
            Self::Grant { .. } => 5,
            Self::Refuse { .. } => 6,
            Self::Checksums { .. } => 7,
            Self::Commit(_) => 8,
            Self::Ack { .. } => 9,
            Self::Nack { reason: NackReason::NotAdopted | NackReason::Corrupt, .. } => 10,
            Self::Nack { reason: NackReason::DeviceBusy | NackReason::Device, .. } => 22,
            Self::Abort { .. } => 11,
            Self::Aborted { .. } => 12,
            Self::Ask { blocks, .. } if begins_late(blocks) => 21,
            Self::Ask { .. } => 13,
            Self::Confirm { .. } => 14,
            Self::Held { .. } => 15,
            Self::NotHeld { .. } => 16,
            Self::Unpin { .. } => 17,
        }
    }

    fn read(kind: u8, r: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(match kind {
            1 => Self::Hello(Box::new(Hello::read(r)?)),
            2 => Self::Welcome(Box::new(Hello::read(r)?)),
            3 => Self::Reject { reason: read_reason(r)?, detail: read_detail(r)? },
            4 => Self::Offer(Box::new(read_offer(r, 0)?)),
            5 => read_grant(r, 0, false)?,
            6 => Self::Refuse { handoff: r.u64("handoff")?, reason: read_reason(r)?, detail: read_detail(r)? },
            7 => Self::Checksums {
                ticket: read_ticket(r)?,
                runs: r.list(RUNS_MAX, 11, "checksums", |r| {
                    Ok(SumRun {
                        group: r.u8("group")?,
                        layer: r.u16("layer")?,
                        first_granule: r.u32("granule")?,
                        sums: r.list(SUMS_MAX, 8, "checksums", |r| r.u64("checksum"))?,
                    })
                })?,
            },
            8 => Self::Commit(Box::new(read_commit(r)?)),
            9 => Self::Ack { ticket: read_ticket(r)? },
            10 => read_nack(r, NackReason::NotAdopted, NackReason::Corrupt)?,
            11 => Self::Abort { handoff: r.u64("handoff")?, ticket: read_ticket(r)?, detail: read_detail(r)? },
            12 => Self::Aborted {
                handoff: r.u64("handoff")?,
                ticket: read_ticket(r)?,
                flushed: read_bool(r)?,
                detail: read_detail(r)?,
            },
            13 => Self::Ask { ticket: read_ticket(r)?, blocks: read_blocks(r, false)? },
            14 => Self::Confirm { ticket: read_ticket(r)? },
            15 => Self::Held { ticket: read_ticket(r)?, algorithm: r.u16("algorithm")?, sums: r.u64("checksums")? },
            16 => Self::NotHeld { ticket: read_ticket(r)?, detail: read_detail(r)? },
            17 => Self::Unpin { handoff: r.u64("handoff")? },
            18 => {
                let from = read_from(r)?;
                read_grant(r, from, false)?
            }
            19 => {
                let from = read_from(r)?;
                Self::Offer(Box::new(read_offer(r, from)?))
            }
            20 => {
                let from = r.u32("first position")?;
                read_grant(r, from, true)?
            }
            21 => Self::Ask { ticket: read_ticket(r)?, blocks: read_blocks(r, true)? },
            22 => read_nack(r, NackReason::DeviceBusy, NackReason::Device)?,
            _ => return Err(WireError::new("the kind of message", "is unknown")),
        })
    }
}

/// Writes the first position of a part, ahead of everything else; writes nothing for the whole.
fn write_from(w: &mut Writer, from: u32) {
    if from > 0 {
        w.u32(from);
    }
}

fn read_from(r: &mut Reader<'_>) -> Result<u32, WireError> {
    match r.u32("first position")? {
        0 => Err(WireError::new("first position", "is that of the whole")),
        from => Ok(from),
    }
}

fn read_grant(r: &mut Reader<'_>, from: u32, with_first: bool) -> Result<Message, WireError> {
    let (handoff, ticket, blocks) = (r.u64("handoff")?, read_ticket(r)?, read_blocks(r, with_first)?);
    Ok(Message::Grant { handoff, ticket, blocks, from })
}

/// One of two reasons, by a flag.
fn read_nack(r: &mut Reader<'_>, unset: NackReason, set: NackReason) -> Result<Message, WireError> {
    let (ticket, flag) = (read_ticket(r)?, read_bool(r)?);
    Ok(Message::Nack { ticket, reason: if flag { set } else { unset }, detail: read_detail(r)? })
}

fn write_offer(w: &mut Writer, offer: &Offer) {
    w.u64(offer.handoff);
    w.text(offer.request_id.as_str());
    write_party(w, &offer.source);
    write_party(w, &offer.sink);
    w.u8(match offer.direction {
        Direction::Put => 0,
        Direction::Get => 1,
    });
    w.u16(offer.shards);
    w.u32(offer.tokens);
    w.u32(offer.deadline_ms);
    w.bytes(&offer.name);
}

fn read_offer(r: &mut Reader<'_>, from: u32) -> Result<Offer, WireError> {
    let handoff = r.u64("handoff")?;
    let text = r.text(RequestId::BYTES_MAX, "request id")?;
    let request_id = RequestId::try_new(text).map_err(|_| WireError::new("request id", "is no name"))?;
    let (source, sink) = (read_party(r)?, read_party(r)?);
    let direction = match r.u8("direction")? {
        0 => Direction::Put,
        1 => Direction::Get,
        _ => return Err(WireError::new("direction", "is unknown")),
    };
    let (shards, tokens, deadline_ms) = (r.u16("shards")?, r.u32("tokens")?, r.u32("deadline")?);
    let name = r.bytes(GetRequest::NAME_BYTES_MAX, "name")?.to_vec();
    Ok(Offer { handoff, request_id, source, sink, direction, shards, from, tokens, deadline_ms, name })
}

fn write_commit(w: &mut Writer, commit: &Commit) {
    w.u64(commit.ticket.0);
    w.u16(commit.algorithm);
    w.u64(commit.sums);
    w.u64(commit.bytes);
    w.u32(commit.prompt_len);
    w.u32s(commit.tokens.iter().copied());
    w.bytes(&commit.extra);
}

fn read_commit(r: &mut Reader<'_>) -> Result<Commit, WireError> {
    Ok(Commit {
        ticket: read_ticket(r)?,
        algorithm: r.u16("checksum algorithm")?,
        sums: r.u64("checksums")?,
        bytes: r.u64("bytes")?,
        prompt_len: r.u32("prompt length")?,
        tokens: r.u32s(CommitPayload::TOKENS_MAX, "tokens", |token| token)?,
        extra: r.bytes(CommitPayload::EXTRA_BYTES_MAX, "extra")?.to_vec(),
    })
}

/// Whether a table begins after position 0. Then the message has a kind of its own, which older peers are never sent.
fn begins_late(blocks: &BlockTables) -> bool {
    blocks.0.iter().any(|table| table.first > 0)
}

fn write_blocks(w: &mut Writer, blocks: &BlockTables) {
    let with_first = begins_late(blocks);
    w.list(&blocks.0, |w, table| {
        if with_first {
            w.u32(table.first as u32);
        }
        w.u32s(table.blocks.iter().map(|block| block.0));
    });
}

fn read_blocks(r: &mut Reader<'_>, with_first: bool) -> Result<BlockTables, WireError> {
    let tables = r.list(8, 4, "groups", |r| {
        let first = if with_first { r.u32("first block")? as usize } else { 0 };
        if first > BLOCKS_MAX {
            return Err(WireError::new("first block", "is beyond any sequence"));
        }
        Ok(BlockTable { first, blocks: r.u32s(BLOCKS_MAX, "blocks", BlockId)? })
    })?;
    let tables = BlockTables(tables);
    match with_first && !begins_late(&tables) {
        true => Err(WireError::new("first block", "is 0 in all groups")),
        false => Ok(tables),
    }
}

fn read_ticket(r: &mut Reader<'_>) -> Result<TicketId, WireError> {
    r.u64("ticket").map(TicketId)
}

fn read_bool(r: &mut Reader<'_>) -> Result<bool, WireError> {
    match r.u8("flag")? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::new("flag", "is neither 0 nor 1")),
    }
}

fn reason_code(reason: RefuseReason) -> u8 {
    RefuseReason::ALL.iter().position(|&r| r == reason).expect("ALL lists every reason") as u8
}

fn read_reason(r: &mut Reader<'_>) -> Result<RefuseReason, WireError> {
    let code = r.u8("reason")?;
    RefuseReason::ALL.get(usize::from(code)).copied().ok_or(WireError::new("reason", "is unknown"))
}

fn write_detail(w: &mut Writer, detail: &str) {
    w.text(&detail[..detail.floor_char_boundary(DETAIL_BYTES_MAX)]);
}

fn read_detail(r: &mut Reader<'_>) -> Result<String, WireError> {
    r.text(DETAIL_BYTES_MAX, "detail").map(str::to_owned)
}
