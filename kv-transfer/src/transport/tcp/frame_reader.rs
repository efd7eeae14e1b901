//! Reads frames from pieces of any size: reports each complete frame, and stores writes as their bytes arrive. Into memory that is not the
//! host's they go from buffers, see [`Incoming`].

use super::frame::{HEAD_BYTES, Head};
use crate::message::{GREETING_BYTES_MAX, MESSAGE_BYTES_MAX};
use crate::transport::incoming::Incoming;
use crate::transport::pool::{Pool, STAGE_BYTES};
use crate::transport::windows::Windows;
use baton_memory::HostPool;
use baton_types::TicketId;
use std::sync::Arc;

/// A frame that arrived completely, apart from the bytes of writes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    Message(Vec<u8>),
    Attach(Vec<u8>),
    Flush {
        id: u64,
        posted: u64,
    },
    Flushed(u64),
    Ping,
    /// The head of a write that no open window covers.
    Refused,
}

/// The current incoming frame.
enum Frame {
    Head {
        bytes: [u8; HEAD_BYTES],
        filled: usize,
    },
    Body {
        bytes: Vec<u8>,
        len: usize,
        attach: bool,
    },
    /// Stored at `offset` while the ticket's window is open, dropped otherwise.
    Put {
        ticket: TicketId,
        offset: usize,
        left: usize,
        store: bool,
    },
}

const NO_FRAME: Frame = Frame::Head { bytes: [0; HEAD_BYTES], filled: 0 };

pub(super) struct FrameReader {
    /// Writes that are being stored.
    pub(super) incoming: Incoming,
    /// Bytes of the current write that are not being stored yet.
    staged: Vec<u8>,
    /// Ranges that the peer may write, by ticket.
    pub(super) windows: Windows,
    frame: Frame,
    /// Frames of any kind and length are accepted.
    settled: bool,
    /// Limit for a settled peer.
    message_bytes_max: usize,
}

impl FrameReader {
    /// Until a peer is `settled`, only its greeting is accepted.
    pub(super) fn new(pool: Pool, settled: bool) -> Self {
        Self {
            incoming: Incoming::new(pool),
            staged: Vec::new(),
            windows: Windows::default(),
            frame: NO_FRAME,
            settled,
            message_bytes_max: MESSAGE_BYTES_MAX,
        }
    }

    /// Sets the longest message to accept from now on.
    pub(super) fn limit_messages(&mut self, bytes_max: usize) {
        self.message_bytes_max = bytes_max;
    }

    pub(super) fn settle(&mut self) {
        self.settled = true;
    }

    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Begins to store nothing more under this ticket, not even the rest of a write that has begun.
    pub(super) fn close_window(&mut self, closed: TicketId) {
        self.windows.close(closed);
        self.incoming.close_window(closed);
        if let Frame::Put { ticket, store, .. } = &mut self.frame
            && *ticket == closed
        {
            *store = false;
            self.staged.clear();
        }
    }

    pub(super) fn is_between_frames(&self) -> bool {
        matches!(self.frame, Frame::Head { filled: 0, .. })
    }

    /// Where the next bytes of the stream belong in host memory, if they do: the memory, offset and length.
    pub(super) fn landing(&self) -> Option<(&Arc<HostPool>, usize, usize)> {
        match self.frame {
            Frame::Put { offset, left, store: true, .. } => Some((self.incoming.pool().host()?, offset, left)),
            _ => None,
        }
    }

    /// This many bytes were stored there.
    pub(super) fn landed(&mut self, bytes: usize) {
        if let Frame::Put { offset, left, .. } = &mut self.frame {
            (*offset, *left) = (*offset + bytes, *left - bytes);
            if *left == 0 {
                self.frame = NO_FRAME;
            }
        }
    }

    /// Consumes bytes from the front of `from`, at most those of one step of a frame. Call it until `from` is empty. `only_puts` refuses
    /// other frames before any of their bytes are processed.
    pub(super) fn take(&mut self, from: &mut &[u8], only_puts: bool) -> Result<Option<Arrived>, String> {
        match &mut self.frame {
            Frame::Head { bytes, filled } => {
                let part = split(from, HEAD_BYTES - *filled);
                bytes[*filled..*filled + part.len()].copy_from_slice(part);
                *filled += part.len();
                if *filled < HEAD_BYTES {
                    return Ok(None);
                }
                let head = Head::decode(bytes)?;
                self.frame = NO_FRAME;
                if only_puts && !matches!(head, Head::Put { .. }) {
                    return Err("a control message in clear".into());
                }
                self.begin(head)
            }
            Frame::Body { .. } if only_puts => Err("a control message in clear".into()),
            Frame::Body { bytes, len, attach } => {
                bytes.extend_from_slice(split(from, *len - bytes.len()));
                if bytes.len() < *len {
                    return Ok(None);
                }
                let (bytes, attach) = (std::mem::take(bytes), *attach);
                self.frame = NO_FRAME;
                Ok(Some(if attach { Arrived::Attach(bytes) } else { Arrived::Message(bytes) }))
            }
            Frame::Put { offset, left, store, .. } => {
                let part = split(from, *left);
                if *store {
                    let (at, ends) = (*offset, part.len() == *left);
                    self.store(at, part, ends);
                }
                self.landed(part.len());
                Ok(None)
            }
        }
    }

    /// Stores bytes of a write, the last ones if it `ends` with them.
    fn store(&mut self, offset: usize, part: &[u8], ends: bool) {
        if let Some(host) = self.incoming.pool().host() {
            return host.copy_in(offset, part);
        }
        if self.staged.capacity() == 0 {
            self.staged = self.incoming.buffer();
        }
        self.staged.extend_from_slice(part);
        if ends || self.staged.len() >= STAGE_BYTES {
            let bytes = std::mem::take(&mut self.staged);
            self.incoming.store(offset + part.len() - bytes.len(), bytes);
        }
    }

    fn begin(&mut self, head: Head) -> Result<Option<Arrived>, String> {
        let len_max = if self.settled { self.message_bytes_max } else { GREETING_BYTES_MAX };
        match head {
            Head::Message { len } | Head::Attach { len } if len > len_max => {
                Err(format!("a message of {len} bytes, where at most {len_max} are taken"))
            }
            Head::Message { len } => self.begin_body(len, false),
            Head::Attach { len } => self.begin_body(len, true),
            Head::Ping => Ok(Some(Arrived::Ping)),
            _ if !self.settled => Err("a write or a flush before the greeting".into()),
            Head::Put { ticket, offset, len } => self.begin_put(TicketId(ticket), offset, len),
            Head::Flush { id, posted } => Ok(Some(Arrived::Flush { id, posted })),
            Head::Flushed { id } => Ok(Some(Arrived::Flushed(id))),
        }
    }

    fn begin_body(&mut self, len: usize, attach: bool) -> Result<Option<Arrived>, String> {
        self.frame = Frame::Body { bytes: Vec::new(), len, attach };
        Ok(None)
    }

    /// A write outside of the region breaks the protocol. A write that no open window covers may be late, and is dropped.
    fn begin_put(&mut self, ticket: TicketId, offset: u64, len: usize) -> Result<Option<Arrived>, String> {
        let range = usize::try_from(offset).ok().and_then(|offset| Some(offset..offset.checked_add(len)?));
        let range =
            range.filter(|range| self.incoming.pool().contains(range)).ok_or("a write outside of the region")?;
        let store = self.windows.allow(ticket, &range);
        self.frame = Frame::Put { ticket, offset: range.start, left: len, store };
        Ok((!store).then_some(Arrived::Refused))
    }
}

/// Removes up to `len` bytes from the front.
fn split<'a>(from: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (part, rest) = from.split_at(len.min(from.len()));
    *from = rest;
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::pool::tests::host;
    use crate::window::Window;

    fn all(reader: &mut FrameReader, bytes: &[u8], only_puts: bool) -> Result<Vec<Arrived>, String> {
        let (mut rest, mut arrived) = (bytes, Vec::new());
        while !rest.is_empty() {
            arrived.extend(reader.take(&mut rest, only_puts)?);
        }
        Ok(arrived)
    }

    fn frame(head: Head, body: &[u8]) -> Vec<u8> {
        [&head.encode()[..], body].concat()
    }

    #[test]
    fn frames_in_pieces_of_any_size_are_the_same() {
        let stream = [
            frame(Head::Message { len: 3 }, b"abc"),
            frame(Head::Put { ticket: 5, offset: 100, len: 6 }, b"stored"),
            frame(Head::Flush { id: 1, posted: 2 }, b""),
            frame(Head::Put { ticket: 6, offset: 300, len: 7 }, b"dropped"),
            frame(Head::Attach { len: 2 }, b"de"),
            frame(Head::Flushed { id: 3 }, b""),
            frame(Head::Ping, b""),
        ]
        .concat();
        for piece in [1, 2, 3, 7, 24, 25, 31, stream.len()] {
            let region = HostPool::new(4096).unwrap();
            let mut reader = FrameReader::new(host(&region), true);
            reader.windows.open(TicketId(5), Window::of(std::iter::once(100..200).collect()));
            let pieces = stream.chunks(piece);
            let arrived: Vec<_> = pieces.flat_map(|piece| all(&mut reader, piece, false).unwrap()).collect();
            let (flush, attach) = (Arrived::Flush { id: 1, posted: 2 }, Arrived::Attach(b"de".to_vec()));
            let expected = [Arrived::Message(b"abc".to_vec()), flush, Arrived::Refused, attach, Arrived::Flushed(3)];
            assert_eq!(arrived, expected.into_iter().chain([Arrived::Ping]).collect::<Vec<_>>(), "in {piece}s");
            let mut stored = [0; 400];
            region.copy_out(0, &mut stored);
            assert_eq!(&stored[100..106], b"stored");
            assert!(stored[..100].iter().chain(&stored[106..]).all(|&byte| byte == 0));
        }
    }

    #[test]
    fn a_peer_that_has_not_said_who_it_is_may_send_a_greeting_and_nothing_else() {
        let refused = |head: Head| {
            let mut reader = FrameReader::new(host(&HostPool::new(4096).unwrap()), false);
            all(&mut reader, &head.encode(), false).is_err()
        };
        for head in [
            Head::Message { len: GREETING_BYTES_MAX + 1 },
            Head::Message { len: MESSAGE_BYTES_MAX },
            Head::Attach { len: GREETING_BYTES_MAX + 1 },
            Head::Put { ticket: 1, offset: 0, len: 1 },
            Head::Flush { id: 1, posted: 0 },
            Head::Flushed { id: 1 },
        ] {
            assert!(refused(head), "{head:?}");
        }
        for head in [Head::Message { len: GREETING_BYTES_MAX }, Head::Attach { len: 1 }, Head::Ping] {
            assert!(!refused(head), "{head:?}");
        }
    }

    #[test]
    fn a_peer_that_has_greeted_sends_messages_as_long_as_they_may_be() {
        for (len, refused) in [(100, false), (101, true), (MESSAGE_BYTES_MAX, true)] {
            let mut reader = FrameReader::new(host(&HostPool::new(4096).unwrap()), true);
            reader.limit_messages(100);
            assert_eq!(all(&mut reader, &Head::Message { len }.encode(), false).is_err(), refused, "{len}");
        }
    }

    #[test]
    fn only_writes_may_come_in_clear() {
        let mut reader = FrameReader::new(host(&HostPool::new(4096).unwrap()), true);
        let put = frame(Head::Put { ticket: 1, offset: 0, len: 2 }, b"ab");
        assert_eq!(all(&mut reader, &put, true).unwrap(), [Arrived::Refused]);
        assert!(reader.is_between_frames());
        for head in [Head::Message { len: 1 }, Head::Flush { id: 1, posted: 0 }, Head::Flushed { id: 1 }, Head::Ping] {
            let mut reader = FrameReader::new(host(&HostPool::new(4096).unwrap()), true);
            assert!(all(&mut reader, &head.encode(), true).is_err(), "{head:?}");
        }
    }
}
