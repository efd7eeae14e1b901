//! The queue of outgoing frames: heads, own bodies, and bodies in the region. They are gathered for the socket, or copied to be encrypted.

use super::frame::{HEAD_BYTES, Head};
use crate::Region;
use crate::plan::CopyRun;
use crate::region::{PARTS_MAX, Part};
use baton_types::{PoolMemory, TicketId};
use std::collections::VecDeque;

/// Most control bytes queued for a peer that does not read.
const MESSAGE_BYTES_MAX: usize = 128 << 20;
/// Most flush answers queued for it. A service has at most one flush in progress on each connection.
const FLUSH_ANSWERS_MAX: usize = 64;

struct Out {
    head: [u8; HEAD_BYTES],
    body: Body,
    written: usize,
}

enum Body {
    None,
    Own(Vec<u8>),
    Region(CopyRun),
    /// No body either; counted, because the peer determines their number.
    FlushAnswer,
}

impl Out {
    fn len(&self) -> usize {
        HEAD_BYTES
            + match &self.body {
                Body::None | Body::FlushAnswer => 0,
                Body::Own(bytes) => bytes.len(),
                Body::Region(run) => run.len,
            }
    }

    fn is_put(&self) -> bool {
        matches!(self.body, Body::Region(_))
    }

    /// The bytes that are not written yet.
    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let body_at = self.written.saturating_sub(HEAD_BYTES);
        let body = match &self.body {
            Body::None | Body::FlushAnswer => Part::Own(&[]),
            Body::Own(bytes) => Part::Own(&bytes[body_at..]),
            Body::Region(run) => Part::Region { offset: run.from + body_at, len: run.len - body_at },
        };
        let head = Part::Own(&self.head[self.written.min(HEAD_BYTES)..]);
        [head, body].into_iter().filter(|part| part.len() > 0)
    }
}

/// Which frames to take together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kinds {
    All,
    Puts,
    AllButPuts,
}

impl Kinds {
    fn include(self, out: &Out) -> bool {
        match self {
            Self::All => true,
            Self::Puts => out.is_put(),
            Self::AllButPuts => !out.is_put(),
        }
    }
}

#[derive(Default)]
pub(super) struct FrameWriter {
    queue: VecDeque<Out>,
    message_bytes: usize,
    flush_answers: usize,
}

impl FrameWriter {
    fn push(&mut self, head: Head, body: Body) {
        self.queue.push_back(Out { head: head.encode(), body, written: 0 });
    }

    pub(super) fn message(&mut self, message: Vec<u8>) {
        self.message_bytes += message.len();
        self.push(Head::Message { len: message.len() }, Body::Own(message));
    }

    pub(super) fn attach(&mut self, body: Vec<u8>) {
        self.message_bytes += body.len();
        self.push(Head::Attach { len: body.len() }, Body::Own(body));
    }

    pub(super) fn put(&mut self, ticket: TicketId, run: CopyRun) {
        let head = Head::Put { ticket: ticket.0, offset: run.to as u64, len: run.len };
        self.push(head, Body::Region(run));
    }

    pub(super) fn flush(&mut self, id: u64, posted: u64) {
        self.push(Head::Flush { id, posted }, Body::None);
    }

    pub(super) fn flushed(&mut self, id: u64) {
        self.flush_answers += 1;
        self.push(Head::Flushed { id }, Body::FlushAnswer);
    }

    pub(super) fn ping(&mut self) {
        self.push(Head::Ping, Body::None);
    }

    /// Fails for a peer that lets more accumulate than a correct one does.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.message_bytes > MESSAGE_BYTES_MAX {
            return Err("the peer does not read its messages".into());
        }
        if self.flush_answers > FLUSH_ANSWERS_MAX {
            return Err("the peer asks for flushes and does not read the answers".into());
        }
        Ok(())
    }

    /// Whether the next frame is a write, and whether a part of it was sent.
    pub(super) fn next(&self) -> Option<(bool, bool)> {
        self.queue.front().map(|out| (out.is_put(), out.written > 0))
    }

    /// The next bytes of frames of these kinds, without copying.
    pub(super) fn gather(&self, kinds: Kinds, bytes_max: usize) -> Vec<Part<'_>> {
        let mut left = bytes_max;
        let of = self.queue.iter().take_while(|out| kinds.include(out)).flat_map(Out::parts);
        let parts = of.take(PARTS_MAX).take_while(|part| {
            let fits = left > 0;
            left = left.saturating_sub(part.len());
            fits
        });
        parts.collect()
    }

    /// Copies the next bytes of frames of these kinds to the front of `to`; returns their number.
    pub(super) fn copy(&self, kinds: Kinds, region: &Region, to: &mut [u8]) -> usize {
        let mut at = 0;
        for part in self.queue.iter().take_while(|out| kinds.include(out)).flat_map(Out::parts) {
            let n = part.len().min(to.len() - at);
            match part {
                Part::Own(bytes) => to[at..at + n].copy_from_slice(&bytes[..n]),
                Part::Region { offset, .. } => region.read(offset, &mut to[at..at + n]),
            }
            at += n;
            if at == to.len() {
                break;
            }
        }
        at
    }

    /// This many bytes were sent; `put_done` gets the length of each completed write.
    pub(super) fn went(&mut self, mut bytes: usize, mut put_done: impl FnMut(usize)) {
        while let Some(out) = self.queue.front_mut() {
            let part = bytes.min(out.len() - out.written);
            out.written += part;
            bytes -= part;
            if out.written < out.len() {
                return;
            }
            match self.queue.pop_front().map(|out| out.body) {
                Some(Body::Region(run)) => put_done(run.len),
                Some(Body::Own(own)) => self.message_bytes -= own.len(),
                Some(Body::FlushAnswer) => self.flush_answers -= 1,
                Some(Body::None) | None => {}
            }
            if bytes == 0 {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> (FrameWriter, std::sync::Arc<Region>) {
        let region = Region::anonymous(4096).unwrap();
        region.write(100, b"0123456789");
        let mut writer = FrameWriter::default();
        writer.message(b"abc".to_vec());
        writer.put(TicketId(7), CopyRun { from: 100, to: 5, len: 10 });
        writer.put(TicketId(7), CopyRun { from: 102, to: 50, len: 4 });
        writer.flush(1, 0);
        (writer, region)
    }

    #[test]
    fn the_same_bytes_go_in_pieces_of_any_size() {
        let expected = [
            &Head::Message { len: 3 }.encode()[..],
            b"abc",
            &Head::Put { ticket: 7, offset: 5, len: 10 }.encode()[..],
            b"0123456789",
            &Head::Put { ticket: 7, offset: 50, len: 4 }.encode()[..],
            b"2345",
            &Head::Flush { id: 1, posted: 0 }.encode()[..],
        ]
        .concat();
        for piece in [1, 5, 24, 27, 60, 200] {
            let (mut writer, region) = filled();
            let (mut went, mut done, mut buffer) = (Vec::new(), Vec::new(), vec![0; piece]);
            while writer.next().is_some() {
                let gathered: usize = writer.gather(Kinds::All, piece).iter().map(Part::len).sum();
                let n = writer.copy(Kinds::All, &region, &mut buffer);
                assert!(n > 0 && gathered >= n, "{gathered} and {n}");
                went.extend_from_slice(&buffer[..n]);
                writer.went(n, |bytes| done.push(bytes));
            }
            assert!(went == expected && done == [10, 4], "in {piece}s");
        }
    }

    #[test]
    fn writes_and_the_rest_can_be_taken_apart() {
        let (mut writer, region) = filled();
        let mut buffer = [0; 400];
        assert!(writer.gather(Kinds::Puts, 400).is_empty());
        let n = writer.copy(Kinds::AllButPuts, &region, &mut buffer);
        assert_eq!(n, HEAD_BYTES + 3);
        writer.went(n, |_| panic!("a message is no write"));
        assert_eq!(writer.copy(Kinds::AllButPuts, &region, &mut buffer), 0);
        assert_eq!(writer.gather(Kinds::Puts, 400).iter().map(Part::len).sum::<usize>(), 2 * HEAD_BYTES + 14);
        writer.went(HEAD_BYTES + 1, |_| panic!("it is not complete"));
        assert_eq!(writer.next(), Some((true, true)));
    }

    #[test]
    fn answers_that_a_peer_does_not_read_are_bounded() {
        let mut writer = FrameWriter::default();
        (0..FLUSH_ANSWERS_MAX as u64).for_each(|id| writer.flushed(id));
        assert!(writer.check().is_ok());
        writer.flushed(0);
        assert!(writer.check().is_err());
        writer.went(HEAD_BYTES, |_| {});
        assert!(writer.check().is_ok(), "one was read");
    }
}
