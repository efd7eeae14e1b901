//! Puts that their sink carries out: it reads what its source would write, one-sided, into blocks that the source may write.
//!
//! So it is where a pool may be read and not written ([`super::data_path::DataPath::Gets`]). A sink that can read its source says so, once
//! it has the source's key. From then on the source names over the channel what it would write, by [`LaneMessage::Pull`]. The sink checks
//! each name against its windows, as it does a message that brings bytes, and tells how many have ended. All else is as with messages:
//! tickets, flushes that count, windows that wait for what is on its way. No peer writes into the sink's pool at all.

use super::data_path::DataPath;
use super::{Purpose, Ucx};
use crate::plan::CopyRun;
use crate::transport::{ConnId, Event};
use crate::wire::{Reader, WireError, Writer};
use baton_memory::Pending;
use baton_types::TicketId;
use std::collections::VecDeque;

/// Most reads of one connection that its sink was asked for and that have not ended: enough to keep a NIC busy with runs of a few KiB.
const PULLS_MAX: usize = 4096;
/// Most of them in one message.
const BATCH_MAX: usize = 512;
/// Bytes of one in a message.
const PULL_BYTES: usize = 32;

/// What one side tells the other about reads, behind its worker's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LaneMessage {
    /// The sender reads what the receiver would write to it.
    Reads,
    /// Read these.
    Pull(Vec<Pull>),
    /// So many reads have ended, or were refused, of all that were asked for on this connection.
    Pulled(u64),
}

/// A read: from the sender's pool into the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pull {
    pub(super) ticket: TicketId,
    pub(super) run: CopyRun,
}

impl LaneMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Reads => w.u8(1),
            Self::Pull(pulls) => {
                w.u8(2);
                w.list(pulls, |w, Pull { ticket, run }| {
                    [ticket.0, run.from as u64, run.to as u64, run.len as u64]
                        .into_iter()
                        .for_each(|field| w.u64(field));
                });
            }
            Self::Pulled(ended) => {
                w.u8(3);
                w.u64(*ended);
            }
        }
        w.finish()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader::new(bytes);
        let message = match r.u8("kind")? {
            1 => Self::Reads,
            2 => Self::Pull(r.list(BATCH_MAX, PULL_BYTES, "reads", |r| {
                let ticket = TicketId(r.u64("ticket")?);
                let mut number = || usize::try_from(r.u64("run")?).map_err(|_| WireError::new("run", "is too long"));
                Ok(Pull { ticket, run: CopyRun { from: number()?, to: number()?, len: number()? } })
            })?),
            3 => Self::Pulled(r.u64("reads")?),
            _ => return Err(WireError::new("what a peer says of its lanes", "is of an unknown kind")),
        };
        r.end()?;
        Ok(message)
    }
}

/// Both sides' reads of one connection.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    /// The peer reads what this side would write.
    pub(super) peer_reads: bool,
    /// What the peer was not asked for yet, by the number of the write.
    waiting: VecDeque<(u64, Pull)>,
    /// Number and length of what it was asked for.
    asked: VecDeque<(u64, usize)>,
    /// How many of those the peer has said have ended.
    ended: u64,
    /// How many of the peer's this side has said have ended.
    told: u64,
}

impl Pulls {
    pub(super) fn push(&mut self, number: u64, pull: Pull) {
        self.waiting.push_back((number, pull));
    }

    /// Asks for nothing more.
    pub(super) fn shut(&mut self) {
        self.waiting.clear();
    }

    /// What to ask the peer for now.
    fn next(&mut self) -> Option<LaneMessage> {
        let room = PULLS_MAX.saturating_sub(self.asked.len()).min(BATCH_MAX).min(self.waiting.len());
        let next: Vec<_> = self.waiting.drain(..room).collect();
        self.asked.extend(next.iter().map(|(number, pull)| (*number, pull.run.len)));
        (!next.is_empty()).then(|| LaneMessage::Pull(next.into_iter().map(|(_, pull)| pull).collect()))
    }

    /// The peer says that so many have ended. Returns their numbers and lengths.
    fn ended(&mut self, ended: u64) -> Result<Vec<(u64, usize)>, String> {
        let more = ended.checked_sub(self.ended).and_then(|more| usize::try_from(more).ok());
        let more =
            more.filter(|more| *more <= self.asked.len()).ok_or("the peer has read what it was not asked for")?;
        self.ended = ended;
        Ok(self.asked.drain(..more).collect())
    }
}

impl Ucx {
    /// Tells the peer that this side reads what it would write, if that is so.
    pub(super) fn offer_reads(&mut self, conn: ConnId, only_reads: bool) {
        let reads = self.connections.writing(conn).is_some_and(|writing| writing.gets);
        if reads && (self.path == DataPath::Gets || only_reads) {
            self.channel.attach(conn, LaneMessage::Reads.encode());
        }
    }

    /// The peer says something of its lanes, whose address is known.
    pub(super) fn lane_message(&mut self, conn: ConnId, body: &[u8], events: &mut Vec<Event>) -> Result<(), String> {
        let has_key = self.memory.is_some();
        let Some(connection) = self.connections.live_mut(conn) else { return Ok(()) };
        let Some(writing) = connection.writing_mut() else { return Err("it has no lanes".into()) };
        match LaneMessage::decode(body).map_err(|error| error.to_string())? {
            LaneMessage::Reads if !has_key => Err("the peer reads a pool that it has no key of".into()),
            LaneMessage::Reads => {
                writing.pulls.peer_reads = true;
                Ok(())
            }
            LaneMessage::Pull(_) if !writing.gets => Err("the peer asks for reads that this side does not do".into()),
            LaneMessage::Pull(pulls) => pulls.into_iter().try_for_each(|pull| self.pull(conn, pull)),
            LaneMessage::Pulled(ended) => {
                for (number, len) in writing.pulls.ended(ended)? {
                    writing.sent(number);
                    events.push(Event::PutDone(conn, len));
                }
                events.extend(writing.take_flushed().into_iter().map(|id| Event::Flushed(conn, id)));
                Ok(())
            }
        }
    }

    /// Reads what the peer would write, if it may write it there.
    fn pull(&mut self, conn: ConnId, Pull { ticket, run }: Pull) -> Result<(), String> {
        let Some(memory) = self.memory.clone() else { return Err("there is no pool to read into".into()) };
        let end = run.to.checked_add(run.len).filter(|end| *end <= memory.len());
        let end = end.ok_or("a write outside of the region")?;
        let Some(writing) = self.connections.writing(conn) else { return Ok(()) };
        let Some(from) = writing.remote_address(run.from, run.len) else {
            return Err("a read outside of its region".into());
        };
        // A correct source asks for each byte of the pool once before it is told that the read has ended.
        let under_way = writing.door.pulls();
        if under_way.count >= PULLS_MAX || under_way.bytes + run.len > memory.len() {
            return Err("the peer asks for more reads at once than it may".into());
        }
        if !writing.door.admits(ticket, &(run.to..end)) {
            writing.door.follow(Pending::ended(Ok(())), 0);
            return Ok(());
        }
        let (pending, completer) = Pending::running();
        writing.door.follow(pending, run.len);
        let token = self.begin(conn, Purpose::Pull(completer));
        let Some(lanes) = self.connections.get(&conn).and_then(|c| c.lanes.as_ref()) else { return Ok(()) };
        if let (Some(endpoint), Some((key, _))) = (&lanes.endpoint, &lanes.writing.key) {
            endpoint.get(token, &memory, run.to, run.len, from, key);
        }
        Ok(())
    }

    /// Asks the peer for what there is room for, and tells it what has ended here.
    pub(super) fn tell_pulls(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.live_mut(conn) else { return };
        let Some(writing) = connection.writing_mut() else { return };
        let mut messages = Vec::new();
        while let Some(message) = writing.pulls.next() {
            messages.push(message);
        }
        let ended = writing.door.pulled();
        if ended > writing.pulls.told {
            writing.pulls.told = ended;
            messages.push(LaneMessage::Pulled(ended));
        }
        messages.iter().for_each(|message| self.channel.attach(conn, message.encode()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::writing::{Writing, flush_tests};
    use super::*;
    use crate::UcxWrites;
    use crate::message::RemoteRegion;
    use crate::transport::Transport as _;
    use crate::ucx::Token as Operation;
    use flush_tests::{Side, until};
    use std::time::Instant;

    fn pull(at: usize) -> Pull {
        Pull { ticket: TicketId(7), run: CopyRun { from: at, to: 1 << 40, len: 3 } }
    }

    #[test]
    fn what_sides_say_of_reads_round_trips() {
        let full = (0..BATCH_MAX).map(pull).collect();
        for message in [
            LaneMessage::Reads,
            LaneMessage::Pull(vec![pull(1), pull(2)]),
            LaneMessage::Pull(full),
            LaneMessage::Pulled(9),
        ] {
            let bytes = message.encode();
            assert_eq!(LaneMessage::decode(&bytes), Ok(message));
            assert!(LaneMessage::decode(&bytes[..bytes.len() - 1]).is_err());
            assert!(LaneMessage::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
        let many = LaneMessage::Pull((0..=BATCH_MAX).map(pull).collect());
        assert!(LaneMessage::decode(&many.encode()).is_err() && LaneMessage::decode(&[4]).is_err());
    }

    /// Two connected sides, the first of which knows that the second one reads from it.
    fn connected() -> (Side, ConnId, Side, ConnId) {
        let (mut a, from, mut b, to) = flush_tests::connected(UcxWrites::Read);
        until(&mut a, &mut b, "it reads", |a, _| writing(a, from).pulls.peer_reads);
        (a, from, b, to)
    }

    fn writing(side: &Side, conn: ConnId) -> &Writing {
        side.ucx.connections.writing(conn).unwrap()
    }

    fn count(side: &Side, of: fn(&Event) -> bool) -> usize {
        side.events.iter().filter(|event| of(event)).count()
    }

    fn bytes(side: &Side, at: usize) -> [u8; 8] {
        let mut bytes = [0; 8];
        side.region.copy_out(at, &mut bytes);
        bytes
    }

    #[test]
    fn a_sink_reads_what_its_source_would_write() {
        let (mut a, from, mut b, to) = connected();
        assert!(a.ucx.region().reads_only && !writing(&a, from).puts, "nobody has a key to put by");
        a.region.copy_in(0, &[7; 64]);
        (0..3).for_each(|at| a.ucx.put(from, TicketId(5), CopyRun { from: 0, to: 64 * at, len: 64 }));
        // Outside of the window.
        a.ucx.put(from, TicketId(6), CopyRun { from: 0, to: 512, len: 64 });
        a.ucx.flush(from, 7);
        until(&mut a, &mut b, "flushed", |a, _| a.has_flushed());
        assert_eq!([0, 136, 184, 192, 512].map(|at| bytes(&b, at)[0]), [7, 7, 7, 0, 0]);
        assert_eq!((writing(&a, from).pulls.ended, writing(&b, to).door.pulled()), (4, 4), "none was a message");
        assert_eq!(count(&a, |event| matches!(event, Event::PutDone(_, 64))), 4);
        assert_eq!(count(&b, |event| matches!(event, Event::PutRefused(_))), 1);
    }

    /// Whatever lanes this side has: the peer fences no writes into that pool.
    #[test]
    fn nobody_puts_by_a_key_of_reads() {
        let (mut a, from, b, _) = flush_tests::connected(UcxWrites::OneSided);
        assert!(writing(&a, from).puts && writing(&a, from).gets);
        let region = RemoteRegion { reads_only: true, ..b.ucx.region() };
        a.ucx.greeted(from, &region, 1 << 20).unwrap();
        assert!(!writing(&a, from).puts && writing(&a, from).gets);
    }

    #[test]
    fn a_window_is_closed_once_its_last_read_has_ended() {
        let (mut a, from, mut b, to) = connected();
        a.region.copy_in(0, &[7; 64]);
        a.ucx.put(from, TicketId(5), CopyRun { from: 0, to: 64, len: 64 });
        until(&mut a, &mut b, "it is asked to read", |_, b| {
            b.ucx.operations.values().any(|(_, purpose)| matches!(purpose, Purpose::Pull(_))) || bytes(b, 64)[0] == 7
        });
        b.ucx.close_window(to, TicketId(5));
        let is_closed = |event: &Event| matches!(event, Event::WindowClosed(..));
        until(&mut a, &mut b, "the window is closed", |_, b| count(b, is_closed) == 1);
        assert_eq!(bytes(&b, 64), [7; 8]);
    }

    #[test]
    fn what_no_peer_asks_for_closes_the_connection() {
        let (mut a, from, mut b, to) = connected();
        let far = |run| LaneMessage::Pull(vec![Pull { ticket: TicketId(5), run }]).encode();
        let says = |side: &mut Side, conn, body: &[u8]| side.ucx.lane_message(conn, body, &mut Vec::new());
        for run in [(0, 4000, 97), (4000, 0, 97), (0, usize::MAX, 1), (usize::MAX, 0, 1)] {
            let run = CopyRun { from: run.0, to: run.1, len: run.2 };
            assert!(says(&mut b, to, &far(run)).is_err(), "{run:?}");
        }
        assert!(says(&mut a, from, &LaneMessage::Pulled(1).encode()).is_err());
        assert!(says(&mut b, to, &[]).is_err());
        // A side that reads nothing.
        let (_, _, mut other, at) = flush_tests::connected(UcxWrites::ByLanes);
        let run = CopyRun { from: 0, to: 0, len: 8 };
        assert!(says(&mut other, at, &far(run)).is_err());
    }

    /// A read that UCX does not end before a test does.
    fn begin_read(side: &mut Side, conn: ConnId) -> Operation {
        let (pending, completer) = Pending::running();
        writing(side, conn).door.follow(pending, 8);
        side.ucx.begin(conn, Purpose::Pull(completer))
    }

    fn closed(side: &Side) -> Vec<(bool, bool)> {
        let closed = side.events.iter().filter_map(|event| match event {
            Event::Closed { fenced, draining, .. } => Some((*fenced, *draining)),
            _ => None,
        });
        closed.collect()
    }

    fn drained(side: &Side) -> Vec<bool> {
        let drained = side.events.iter().filter_map(|event| match event {
            Event::Drained { fenced, .. } => Some(*fenced),
            _ => None,
        });
        drained.collect()
    }

    #[test]
    fn reads_that_run_on_keep_their_worker_until_they_have_ended() {
        let (mut a, _, mut b, to) = connected();
        b.ucx.copies_run_on = true;
        let pull = begin_read(&mut b, to);
        let get = b.ucx.begin(to, Purpose::Get(1, 8));
        b.ucx.close(to, "the end");
        until(&mut a, &mut b, "closed", |_, b| !closed(b).is_empty());
        assert_eq!((closed(&b), drained(&b)), (vec![(false, true)], vec![]));
        assert!(!b.ucx.closing_fences(to));
        for operation in [get, pull] {
            (0..100).for_each(|_| _ = b.ucx.progress(Instant::now(), &mut b.events));
            assert!(drained(&b).is_empty() && b.ucx.connections.contains_key(&to), "one runs on");
            b.ucx.operation_done(operation, Ok(()), Instant::now(), &mut b.events);
        }
        until(&mut a, &mut b, "drained", |_, b| !drained(b).is_empty());
        assert_eq!((closed(&b).len(), drained(&b)), (1, vec![true]));
        assert_eq!(count(&b, |event| matches!(event, Event::Got(..))), 0, "it was over");
        assert!(b.ucx.connections.is_empty() && b.ucx.operations.is_empty());
    }

    /// Nothing else runs on: a worker that is destroyed ends it.
    #[test]
    fn what_is_no_read_does_not_keep_a_worker() {
        let ended_by_the_worker: [(bool, fn() -> Purpose); 3] = [
            (true, || Purpose::Flush(7)),
            (true, || Purpose::Put { len: 8, number: None }),
            (false, || Purpose::Get(1, 8)),
        ];
        for (copies_run_on, purpose) in ended_by_the_worker {
            let (mut a, _, mut b, to) = connected();
            b.ucx.copies_run_on = copies_run_on;
            b.ucx.begin(to, purpose());
            b.ucx.close(to, "the end");
            until(&mut a, &mut b, "closed", |_, b| !closed(b).is_empty());
            assert_eq!(closed(&b), [(true, false)]);
        }
    }

    #[test]
    fn a_message_among_reads_closes_the_connection() {
        let (mut a, from, mut b, to) = connected();
        let put = |a: &mut Side| {
            a.ucx.connections.writing_mut(from).unwrap().pulls.peer_reads = false;
            a.ucx.put(from, TicketId(5), CopyRun { from: 0, to: 0, len: 64 });
        };
        put(&mut a);
        until(&mut a, &mut b, "a message without reads", |a, _| count(a, |e| matches!(e, Event::PutDone(..))) == 1);
        (0..100).for_each(|_| _ = b.ucx.progress(Instant::now(), &mut b.events));
        assert!(b.ucx.is_open(to));
        begin_read(&mut b, to);
        put(&mut a);
        until(&mut a, &mut b, "closed", |_, b| !closed(b).is_empty());
        let says =
            |event: &Event| matches!(event, Event::Closed { reason, .. } if reason.contains("by messages among"));
        assert!(b.events.iter().any(says), "{:?}", b.events);
    }

    #[test]
    fn reads_that_a_peer_asks_for_are_bounded_before_they_begin() {
        let asks = |side: &mut Side, conn, ticket, to, len| {
            let pull = Pull { ticket: TicketId(ticket), run: CopyRun { from: 0, to, len } };
            side.ucx.lane_message(conn, &LaneMessage::Pull(vec![pull]).encode(), &mut Vec::new())
        };
        let running = |side: &Side| side.ucx.operations.values().filter(|(_, purpose)| purpose.reads()).count();
        // As many bytes as the pool has.
        let (_a, _, mut b, to) = connected();
        assert_eq!(asks(&mut b, to, 5, 0, 4000), Ok(()));
        assert!(asks(&mut b, to, 5, 0, 97).is_err());
        assert_eq!(asks(&mut b, to, 5, 0, 96), Ok(()));
        assert_eq!(running(&b), 2);
        // As many as a source asks for, also where they are refused.
        for (ticket, begun) in [(5, PULLS_MAX), (6, 0)] {
            let (_a, _, mut b, to) = connected();
            assert!((0..PULLS_MAX).all(|at| asks(&mut b, to, ticket, at % 4096, 1).is_ok()));
            assert!(asks(&mut b, to, ticket, 0, 0).is_err());
            assert_eq!(running(&b), begun);
        }
    }

    /// A peer of the version before would take the message for a second worker, and close the connection.
    #[test]
    fn who_does_not_know_of_reads_is_not_told() {
        let (mut a, from, mut b, to) =
            flush_tests::connected_as(UcxWrites::Read, |region| RemoteRegion { takes_reads: false, ..region });
        a.ucx.put(from, TicketId(5), CopyRun { from: 0, to: 64, len: 64 });
        a.ucx.flush(from, 7);
        until(&mut a, &mut b, "flushed", |a, _| a.has_flushed());
        assert!(!writing(&a, from).pulls.peer_reads);
        assert_eq!(writing(&b, to).door.pulled(), 0);
    }

    #[test]
    fn reads_are_asked_for_within_a_bound_and_end_once() {
        let mut pulls = Pulls::default();
        (0..PULLS_MAX + 2).for_each(|at| pulls.push(at as u64, pull(at)));
        let mut asked = 0;
        while let Some(LaneMessage::Pull(batch)) = pulls.next() {
            assert!(batch.len() <= BATCH_MAX);
            asked += batch.len();
        }
        assert_eq!(asked, PULLS_MAX);
        assert_eq!(pulls.ended(2), Ok(vec![(0, 3), (1, 3)]));
        assert!(pulls.ended(1).is_err(), "fewer than before");
        assert!(pulls.ended(PULLS_MAX as u64 + 1).is_err(), "more than were asked for");
        assert_eq!(pulls.next(), Some(LaneMessage::Pull(vec![pull(PULLS_MAX), pull(PULLS_MAX + 1)])));
    }
}
