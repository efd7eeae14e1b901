//! The queues of outgoing frames: heads, own bodies, and bodies in the pool. They are gathered for the socket, or copied to be encrypted.
//! Bodies in memory that is not the host's are read into buffers first ([`Outgoing`]).
//!
//! Writes keep their order, and a flush stays behind the writes that it covers. Everything else passes them between whole frames, also
//! where the next write waits for its bytes. Nothing refers to the order of the two: a source sends what speaks of its writes (checksums, a
//! commit, the end of an abort) only once a flush is answered, as it must where writes go over lanes.
//!
//! A peer that does not read its answers could queue any number. So their memory is bounded, with that of the queue ([`CONTROL_BYTES_MAX`]):
//! what would exceed the bound is dropped, and the connection is closed.

use super::frame::{HEAD_BYTES, Head};
use crate::plan::CopyRun;
use crate::transport::outgoing::{Outgoing, Progress, Staged};
use crate::transport::pool::{Pool, STAGE_BYTES};
use baton_memory::Pending;
use baton_memory::host::{PARTS_MAX, Part};
use baton_types::TicketId;
use std::collections::VecDeque;
use std::time::Instant;

/// Most memory of what is queued for a peer that does not read, apart from writes and their flushes: the queue with its heads, and messages.
const CONTROL_BYTES_MAX: usize = 128 << 20;
/// What an allocation takes besides its bytes.
const ALLOCATION_BYTES: usize = 32;
/// A queue with room for more frames shrinks once it is nearly empty.
const IDLE_FRAMES: usize = 64;
/// Most flush answers queued for it. A service has at most one flush in progress on each connection.
const FLUSH_ANSWERS_MAX: usize = 64;

struct Out {
    head: [u8; HEAD_BYTES],
    body: Body,
    written: usize,
}

enum Body {
    None,
    /// No body: the peer may answer this flush once it was sent.
    Flush(u64),
    Own(Vec<u8>),
    /// In host memory.
    Pool(CopyRun),
    /// In other memory.
    Staged(Staged),
    /// No body either; counted, because the peer determines their number.
    FlushAnswer,
}

impl Out {
    fn len(&self) -> usize {
        HEAD_BYTES
            + match &self.body {
                Body::None | Body::Flush(_) | Body::FlushAnswer => 0,
                Body::Own(bytes) => bytes.len(),
                Body::Pool(run) => run.len,
                Body::Staged(staged) => staged.len,
            }
    }

    fn is_put(&self) -> bool {
        matches!(self.body, Body::Pool(_) | Body::Staged(_))
    }

    /// Whether its bytes can be sent.
    fn is_ready(&self) -> bool {
        match &self.body {
            Body::Staged(staged) => staged.bytes().is_some(),
            _ => true,
        }
    }

    /// The bytes that are not written yet.
    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let body_at = self.written.saturating_sub(HEAD_BYTES);
        let body = match &self.body {
            Body::None | Body::Flush(_) | Body::FlushAnswer => Part::Own(&[]),
            Body::Own(bytes) => Part::Own(&bytes[body_at..]),
            Body::Pool(run) => Part::Pool { offset: run.from + body_at, len: run.len - body_at },
            Body::Staged(staged) => Part::Own(&staged.bytes().unwrap_or_default()[body_at..]),
        };
        let head = Part::Own(&self.head[self.written.min(HEAD_BYTES)..]);
        [head, body].into_iter().filter(|part| !part.is_empty())
    }
}

/// Memory of a message.
fn message_bytes(body: &Body) -> usize {
    match body {
        Body::Own(bytes) => bytes.capacity() + ALLOCATION_BYTES,
        _ => 0,
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
    /// Whether a frame is of these kinds, and can be sent now.
    fn include(self, out: &Out) -> bool {
        out.is_ready()
            && match self {
                Self::All => true,
                Self::Puts => out.is_put(),
                Self::AllButPuts => !out.is_put(),
            }
    }
}

#[derive(Default)]
pub(super) struct FrameWriter {
    /// Messages, answers to flushes, and keep-alives.
    control: VecDeque<Out>,
    /// Writes, and flushes behind them.
    writes: VecDeque<Out>,
    /// Memory of the messages.
    message_bytes: usize,
    flush_answers: usize,
    /// Something was dropped, because it would have exceeded the bound.
    is_overfull: bool,
    /// Flushes that were sent, behind every write that they cover, and not answered.
    flushes: Vec<u64>,
    outgoing: Outgoing,
}

impl FrameWriter {
    fn push(&mut self, head: Head, body: Body) {
        let queue = match &body {
            Body::Pool(_) | Body::Staged(_) | Body::Flush(_) => &mut self.writes,
            Body::None | Body::Own(_) | Body::FlushAnswer => {
                let message_bytes = message_bytes(&body);
                let room = self.control.capacity();
                // A full queue doubles.
                let frames = if self.control.len() == room { (2 * room).max(IDLE_FRAMES) } else { room };
                if self.message_bytes + message_bytes + frames * size_of::<Out>() > CONTROL_BYTES_MAX {
                    self.is_overfull = true;
                    return;
                }
                self.message_bytes += message_bytes;
                self.control.reserve_exact(frames - self.control.len());
                &mut self.control
            }
        };
        queue.push_back(Out { head: head.encode(), body, written: 0 });
    }

    /// Whether a part of the next write or flush was sent: then nothing passes it.
    fn is_within_write(&self) -> bool {
        self.writes.front().is_some_and(|out| out.written > 0)
    }

    /// All frames in the order in which they go.
    fn frames(&self) -> impl Iterator<Item = &Out> {
        let begun = usize::from(self.is_within_write());
        self.writes.range(..begun).chain(&self.control).chain(self.writes.range(begun..))
    }

    pub(super) fn message(&mut self, message: Vec<u8>) {
        self.push(Head::Message { len: message.len() }, Body::Own(message));
    }

    pub(super) fn attach(&mut self, body: Vec<u8>) {
        self.push(Head::Attach { len: body.len() }, Body::Own(body));
    }

    /// Queues a write. If the pool is not in host memory, it goes in several frames.
    pub(super) fn put(&mut self, pool: &Pool, ticket: TicketId, run: CopyRun) {
        let piece_max = if pool.host().is_some() { run.len } else { STAGE_BYTES };
        for at in (0..run.len).step_by(piece_max.max(1)) {
            let run = CopyRun { from: run.from + at, to: run.to + at, len: piece_max.min(run.len - at) };
            let head = Head::Put { ticket: ticket.0, offset: run.to as u64, len: run.len };
            self.push(
                head,
                match pool.host() {
                    Some(_) => Body::Pool(run),
                    None => Body::Staged(Staged::new(run.from, run.len)),
                },
            );
        }
    }

    /// Reads the next bodies that are not in host memory, as far as there is room for them.
    pub(super) fn stage(&mut self, pool: &Pool, now: Instant) -> Result<(), String> {
        if pool.host().is_some() {
            return Ok(());
        }
        for out in &mut self.writes {
            if let Body::Staged(staged) = &mut out.body
                && self.outgoing.advance(pool, staged, now)? == Progress::NoRoom
            {
                break;
            }
        }
        Ok(())
    }

    /// Drops the queues, after the connection has ended; returns the reads that run.
    pub(super) fn take_reads(&mut self) -> Vec<Pending<Vec<u8>>> {
        self.control.clear();
        let staged = self.writes.drain(..).filter_map(|out| match out.body {
            Body::Staged(staged) => staged.into_read(),
            _ => None,
        });
        staged.collect()
    }

    pub(super) fn flush(&mut self, id: u64, posted: u64) {
        self.push(Head::Flush { id, posted }, Body::Flush(id));
    }

    /// The peer answers a flush. Fails for one that was not sent: then writes that it covers may still read the pool.
    pub(super) fn answered(&mut self, id: u64) -> Result<(), String> {
        let at = self.flushes.iter().position(|sent| *sent == id);
        self.flushes.swap_remove(at.ok_or("the peer answers a flush that it has not received")?);
        Ok(())
    }

    pub(super) fn flushed(&mut self, id: u64) {
        self.flush_answers += 1;
        self.push(Head::Flushed { id }, Body::FlushAnswer);
    }

    pub(super) fn ping(&mut self) {
        self.push(Head::Ping, Body::None);
    }

    /// Memory of what is queued for the peer, apart from writes and their flushes.
    pub(super) fn control_bytes(&self) -> usize {
        self.message_bytes + self.control.capacity() * size_of::<Out>()
    }

    /// Fails for a peer that lets more accumulate than a correct one does.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.is_overfull {
            return Err("the peer does not read its messages".into());
        }
        if self.flush_answers > FLUSH_ANSWERS_MAX {
            return Err("the peer asks for flushes and does not read the answers".into());
        }
        Ok(())
    }

    /// Whether the next frame is a write, and whether a part of it was sent; `None` if no frame can be sent now.
    pub(super) fn next(&self) -> Option<(bool, bool)> {
        self.frames().next().filter(|out| out.is_ready()).map(|out| (out.is_put(), out.written > 0))
    }

    /// The next bytes of frames of these kinds, without copying.
    pub(super) fn gather(&self, kinds: Kinds, bytes_max: usize) -> Vec<Part<'_>> {
        let mut left = bytes_max;
        let of = self.frames().take_while(|out| kinds.include(out)).flat_map(Out::parts);
        let parts = of.take(PARTS_MAX).take_while(|part| {
            let fits = left > 0;
            left = left.saturating_sub(part.len());
            fits
        });
        parts.collect()
    }

    /// Copies the next bytes of frames of these kinds to the front of `to`; returns their number.
    pub(super) fn copy(&self, kinds: Kinds, pool: &Pool, to: &mut [u8]) -> usize {
        let mut at = 0;
        for part in self.frames().take_while(|out| kinds.include(out)).flat_map(Out::parts) {
            let n = part.len().min(to.len() - at);
            match part {
                Part::Own(bytes) => to[at..at + n].copy_from_slice(&bytes[..n]),
                Part::Pool { offset, .. } => {
                    let host = pool.host().expect("only host memory is sent from where it is");
                    host.copy_out(offset, &mut to[at..at + n]);
                }
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
        loop {
            let next =
                if self.is_within_write() || self.control.is_empty() { &mut self.writes } else { &mut self.control };
            let Some(out) = next.front_mut() else { return };
            let part = bytes.min(out.len() - out.written);
            out.written += part;
            bytes -= part;
            if out.written < out.len() {
                return;
            }
            let body = next.pop_front().map(|out| out.body);
            self.message_bytes -= body.as_ref().map_or(0, message_bytes);
            match body {
                Some(Body::Pool(run)) => put_done(run.len),
                Some(Body::Staged(staged)) => {
                    put_done(staged.len);
                    self.outgoing.sent(staged);
                }
                Some(Body::FlushAnswer) => self.flush_answers -= 1,
                Some(Body::Flush(id)) => self.flushes.push(id),
                Some(Body::Own(_) | Body::None) | None => {}
            }
            if self.control.len() < self.control.capacity() / 4 && self.control.capacity() > IDLE_FRAMES {
                self.control.shrink_to(self.control.capacity() / 2);
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
    use crate::transport::pool::tests::{host, remote, soon};
    use baton_memory::HostPool;

    fn filled() -> (FrameWriter, Pool) {
        let memory = HostPool::new(4096).unwrap();
        memory.copy_in(100, b"0123456789");
        let (mut writer, pool) = (FrameWriter::default(), host(&memory));
        writer.message(b"abc".to_vec());
        writer.put(&pool, TicketId(7), CopyRun { from: 100, to: 5, len: 10 });
        writer.put(&pool, TicketId(7), CopyRun { from: 102, to: 50, len: 4 });
        writer.flush(1, 0);
        (writer, pool)
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
            let (mut writer, pool) = filled();
            let (mut went, mut done, mut buffer) = (Vec::new(), Vec::new(), vec![0; piece]);
            while writer.next().is_some() {
                let gathered: usize = writer.gather(Kinds::All, piece).iter().map(Part::len).sum();
                let n = writer.copy(Kinds::All, &pool, &mut buffer);
                assert!(n > 0 && gathered >= n, "{gathered} and {n}");
                went.extend_from_slice(&buffer[..n]);
                writer.went(n, |bytes| done.push(bytes));
            }
            assert!(went == expected && done == [10, 4], "in {piece}s");
        }
    }

    /// All that is left to send, taken in pieces of this size.
    fn drain(writer: &mut FrameWriter, pool: &Pool, piece: usize) -> Vec<u8> {
        let (mut went, mut buffer) = (Vec::new(), vec![0; piece]);
        while writer.next().is_some() {
            let n = writer.copy(Kinds::All, pool, &mut buffer);
            assert!(n > 0 && writer.gather(Kinds::All, piece).iter().map(Part::len).sum::<usize>() >= n);
            went.extend_from_slice(&buffer[..n]);
            writer.went(n, |_| {});
        }
        went
    }

    #[test]
    fn control_passes_writes_and_flushes_between_whole_frames() {
        let puts = [Head::Put { ticket: 7, offset: 5, len: 10 }, Head::Put { ticket: 7, offset: 50, len: 4 }];
        let flush = Head::Flush { id: 1, posted: 0 }.encode();
        let writes =
            [[&puts[0].encode()[..], b"0123456789"].concat(), [&puts[1].encode()[..], b"2345"].concat(), flush.into()];
        let heads = [Head::Ping.encode(), Head::Flushed { id: 9 }.encode(), Head::Message { len: 2 }.encode()];
        let control = [heads.as_flattened(), b"de"].concat();
        let ends = [0, writes[0].len(), writes[0].len() + writes[1].len(), writes.concat().len()];
        for (sent, piece) in (0..=ends[3]).flat_map(|sent| [1, 7, 400].map(|piece| (sent, piece))) {
            let (mut writer, pool) = filled();
            writer.went(HEAD_BYTES + 3, |_| panic!("a message is no write"));
            writer.went(sent, |_| {});
            writer.ping();
            writer.flushed(9);
            writer.message(b"de".to_vec());
            // Behind the frame that was begun.
            let at = ends.into_iter().find(|end| sent <= *end).unwrap();
            let all = writes.concat();
            let expected = [&all[sent..at], &control, &all[at..]].concat();
            assert!(drain(&mut writer, &pool, piece) == expected, "after {sent} bytes of writes, in {piece}s");
        }
    }

    #[test]
    fn control_passes_a_write_whose_bytes_are_not_read() {
        let (memory, pool) = remote();
        let mut writer = FrameWriter::default();
        memory.device_side().copy_in(0, b"01");
        memory.hold();
        writer.put(&pool, TicketId(7), CopyRun { from: 0, to: 5, len: 2 });
        writer.flush(1, 0);
        writer.stage(&pool, Instant::now()).unwrap();
        assert_eq!(writer.next(), None);
        writer.message(b"abc".to_vec());
        writer.ping();
        let control = [&Head::Message { len: 3 }.encode()[..], b"abc", &Head::Ping.encode()].concat();
        assert!(drain(&mut writer, &pool, 400) == control, "and not the flush");
        memory.release();
        soon(|| writer.stage(&pool, Instant::now()).is_ok() && writer.next().is_some());
        let put = Head::Put { ticket: 7, offset: 5, len: 2 }.encode();
        assert!(
            drain(&mut writer, &pool, 400) == [&put[..], b"01", &Head::Flush { id: 1, posted: 0 }.encode()].concat()
        );
    }

    #[test]
    fn writes_and_the_rest_can_be_taken_apart() {
        let (mut writer, pool) = filled();
        let mut buffer = [0; 400];
        assert!(writer.gather(Kinds::Puts, 400).is_empty());
        let n = writer.copy(Kinds::AllButPuts, &pool, &mut buffer);
        assert_eq!(n, HEAD_BYTES + 3);
        writer.went(n, |_| panic!("a message is no write"));
        assert_eq!(writer.copy(Kinds::AllButPuts, &pool, &mut buffer), 0);
        assert_eq!(writer.gather(Kinds::Puts, 400).iter().map(Part::len).sum::<usize>(), 2 * HEAD_BYTES + 14);
        writer.went(HEAD_BYTES + 1, |_| panic!("it is not complete"));
        assert_eq!(writer.next(), Some((true, true)));
    }

    #[test]
    fn a_flush_is_answered_once_and_only_after_it_was_sent() {
        let (mut writer, _) = filled();
        let all: usize = writer.gather(Kinds::All, 400).iter().map(Part::len).sum();
        writer.went(all - 1, |_| {});
        assert!(writer.answered(1).is_err());
        writer.went(1, |_| {});
        assert!(writer.answered(2).is_err() && writer.answered(1).is_ok() && writer.answered(1).is_err());
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

    #[test]
    fn memory_for_a_peer_that_reads_no_answers_is_bounded() {
        for len in [1, 30, 4 << 10, 8 << 20] {
            let (mut writer, mut queued) = (FrameWriter::default(), 0);
            // Without a bound of its own, this ends by the first assertion.
            while writer.check().is_ok() {
                let held = queued * (len + ALLOCATION_BYTES) + writer.control.capacity() * size_of::<Out>();
                assert!(held <= CONTROL_BYTES_MAX, "{queued} answers of {len} bytes take {held}");
                writer.message(vec![0; len]);
                queued += 1;
            }
            assert!(
                queued * (len + size_of::<Out>()) > CONTROL_BYTES_MAX / 3,
                "{queued} answers of {len} bytes are few"
            );
            assert_eq!(writer.control.len(), queued - 1, "the last one is dropped");
            // Memory of what was read is free again.
            while let Some(out) = writer.control.front() {
                writer.went(out.len(), |_| {});
            }
            assert_eq!(writer.message_bytes, 0);
            assert!(writer.control.capacity() <= 4 * IDLE_FRAMES);
        }
    }
}
