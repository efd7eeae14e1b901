//! The data plane between two processes: messages in order, one-sided writes in any order, and what a flush says of them.

use super::clock::{Addr, Fifo, Time, ms};
use super::event::Event;
use super::handoff::Sending;
use super::invariant::Invariant;
use super::world::World;
use baton_kv_transfer::pure::{Commit, CopyRun, SumRun};
use baton_kv_transfer::{HandoffFailure, RefuseReason};
use baton_types::{GroupBlocks, Party, PoolMemory, RequestId, TicketId};
use std::sync::Arc;

/// How a write reaches the sink's memory, which decides what fences it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// By the sink's own process, inside an open window: closing the connection fences.
    Window,
    /// By the sink's NIC, through a queue pair that closing destroys, even while the process stands still.
    QueuePair,
    /// By the source's process: nothing fences but its death.
    SharedMemory,
}

impl Lane {
    pub(super) const ALL: [Self; 3] = [Self::Window, Self::QueuePair, Self::SharedMemory];

    /// Whether the sink's closing of the connection ends all writes on it.
    pub(super) fn closing_fences(self) -> bool {
        self != Self::SharedMemory
    }
}

/// A control message. What it carries is what the transfer's own messages carry.
#[derive(Clone, Debug)]
pub(super) enum Wire {
    Offer { handoff: u64, request: RequestId, tokens: u32, left: Time },
    Grant { handoff: u64, ticket: TicketId, blocks: GroupBlocks },
    Refuse { handoff: u64, reason: RefuseReason },
    Checksums { ticket: TicketId, runs: Arc<Vec<SumRun>> },
    Commit(Box<Commit>),
    Ack { ticket: TicketId },
    Nack { ticket: TicketId, failure: HandoffFailure },
    Abort { handoff: u64 },
    Aborted { handoff: u64, flushed: bool },
}

/// A write under way.
#[derive(Debug)]
struct Put {
    conn: usize,
    /// The source's handoff, whose blocks it reads.
    key: u64,
    ticket: TicketId,
    run: CopyRun,
    /// What it read; until then it may read at any time.
    bytes: Option<Vec<u8>>,
    is_damaged: bool,
}

/// A flush that waits for what was posted before it.
#[derive(Debug)]
struct Flush {
    key: u64,
    epoch: u32,
    waits: Vec<u64>,
}

/// One connection, from the source's process start to what it took for the sink's.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) source: Addr,
    pub(super) source_party: Party,
    pub(super) sink: Addr,
    pub(super) lane: Lane,
    pub(super) source_open: bool,
    pub(super) sink_open: bool,
    pub(super) is_cut: bool,
    forth: Fifo,
    back: Fifo,
    posted: Vec<u64>,
    flushes: Vec<Flush>,
}

/// All connections and writes of a schedule.
#[derive(Debug, Default)]
pub(super) struct Network {
    pub(super) connections: Vec<Connection>,
    puts: std::collections::BTreeMap<u64, Put>,
    put_count: u64,
    /// Processes whose next write is damaged.
    pub(super) damage: Vec<usize>,
}

impl World {
    /// A connection of `source` to the start of `sink` that the caller believes in.
    pub(super) fn connect(&mut self, source: Addr, sink: Addr) -> usize {
        let open = |c: &Connection| c.source == source && c.sink == sink && c.source_open;
        if let Some(conn) = self.net.connections.iter().position(open) {
            return conn;
        }
        let source_party = self.party(source);
        self.net.connections.push(Connection {
            source,
            source_party,
            sink,
            lane: self.shape.lane,
            source_open: true,
            sink_open: true,
            is_cut: false,
            forth: Fifo::default(),
            back: Fifo::default(),
            posted: Vec::new(),
            flushes: Vec::new(),
        });
        self.net.connections.len() - 1
    }

    /// A message of the source.
    pub(super) fn send_forth(&mut self, conn: usize, wire: Wire) {
        let at = self.clock.now() + self.delay();
        let c = &mut self.net.connections[conn];
        if c.source_open {
            let (at, to) = (c.forth.arrive(at), Addr::whoever(c.sink.process));
            self.clock.post(at, to, Event::Wire { conn, wire });
        }
    }

    /// A message of the sink.
    pub(super) fn send_back(&mut self, conn: usize, wire: Wire) {
        let at = self.clock.now() + self.delay();
        let c = &mut self.net.connections[conn];
        if c.sink_open {
            let (at, to) = (c.back.arrive(at), c.source);
            self.clock.post(at, to, Event::Wire { conn, wire });
        }
    }

    /// Copies a run from the source's pool into the sink's, some time from now.
    pub(super) fn post_put(&mut self, conn: usize, key: u64, ticket: TicketId, run: CopyRun) {
        let c = &mut self.net.connections[conn];
        let damage = self.net.damage.iter().position(|p| *p == c.source.process);
        let is_damaged = damage.map(|at| self.net.damage.swap_remove(at)).is_some();
        self.net.put_count += 1;
        let put = self.net.put_count;
        c.posted.push(put);
        let by = match c.lane {
            Lane::Window => Addr::whoever(c.sink.process),
            Lane::QueuePair => Addr::WORLD,
            Lane::SharedMemory => c.source,
        };
        let reads_now = c.lane == Lane::Window;
        self.net.puts.insert(put, Put { conn, key, ticket, run, bytes: None, is_damaged });
        if reads_now {
            self.read_put(put);
        }
        let at = self.clock.now() + self.delay();
        self.clock.post(at, by, Event::Put { put });
    }

    /// A write arrives, or does not.
    pub(super) fn put_arrives(&mut self, put: u64) {
        if self.net.puts.get(&put).is_some_and(|p| p.bytes.is_none()) {
            self.read_put(put);
        }
        let Some(Put { conn, ticket, run, bytes, .. }) = self.net.puts.remove(&put) else { return };
        let lost = self.draw(2) == 0;
        let c = &mut self.net.connections[conn];
        c.posted.retain(|p| *p != put);
        let is_there = c.sink_open || !c.lane.closing_fences();
        let sink = c.sink;
        let is_lost = c.is_cut && lost && c.lane != Lane::SharedMemory;
        if let Some(bytes) = bytes.filter(|_| is_there && !is_lost && self.is_alive(sink)) {
            self.store(conn, ticket, run.to, &bytes);
        }
        let c = &mut self.net.connections[conn];
        let (source, is_gone) = (c.source, c.is_cut || !c.sink_open);
        let mut done = Vec::new();
        c.flushes.retain_mut(|flush| {
            flush.waits.retain(|p| *p != put);
            if flush.waits.is_empty() {
                done.push((flush.key, flush.epoch));
            }
            !flush.waits.is_empty()
        });
        if is_gone || !self.is_alive(sink) {
            return; // Nobody says that it is visible.
        }
        for (key, epoch) in done {
            self.post(source, Event::Flushed { key, epoch });
        }
    }

    /// A write reads its bytes, which its source must have kept for it.
    fn read_put(&mut self, put: u64) {
        let Some(Put { conn, key, run, is_damaged, .. }) = self.net.puts.get(&put) else { return };
        let c = &self.net.connections[*conn];
        let Some(worker) = self.worker(c.source.process).filter(|_| c.source_open && self.is_alive(c.source)) else {
            return;
        };
        if !worker.sending.get(key).is_some_and(Sending::holds) {
            return self.fail(Invariant::HeldBlocks, "a write reads blocks that its source let go".into());
        }
        let mut bytes = vec![0; run.len];
        worker.memory.region.read(run.from, &mut bytes);
        bytes[0] ^= u8::from(*is_damaged);
        if let Some(put) = self.net.puts.get_mut(&put) {
            put.bytes = Some(bytes);
        }
    }

    /// The source's end of a connection closes: a write has left by then, or never will.
    pub(super) fn close_source(&mut self, conn: usize) {
        let has_left = self.net.connections[conn].lane == Lane::QueuePair;
        for put in self.net.connections[conn].posted.clone() {
            let unread = self.net.puts.get(&put).is_some_and(|p| p.bytes.is_none());
            if unread && has_left && self.draw(2) == 0 {
                self.read_put(put);
            }
        }
        self.net.connections[conn].source_open = false;
    }

    /// Bytes reach the sink's memory, unless its window is closed.
    fn store(&mut self, conn: usize, ticket: TicketId, to: usize, bytes: &[u8]) {
        let (sink, lane) = (self.net.connections[conn].sink.process, self.net.connections[conn].lane);
        let Some(worker) = self.worker(sink) else { return };
        let holder = worker.incoming.values().find(|i| i.sink.ticket == ticket && i.conn == conn);
        if lane == Lane::Window && !holder.is_some_and(|i| i.sink.is_granted()) {
            return; // Refused at the door.
        }
        let (map, owned) = (&worker.memory.map, holder.and_then(|i| i.owned()));
        let block_bytes = map.layout().groups()[0].token_bytes() * map.layout().block_tokens() as usize;
        let mut written = to / block_bytes..=(to + bytes.len() - 1) / block_bytes;
        let covers = owned.is_some_and(|blocks| {
            written.all(|block| blocks.0[0].iter().any(|b| b.0 as usize == block % map.blocks() as usize))
        });
        worker.memory.region.write(to, bytes);
        if !covers {
            self.fail(
                Invariant::GrantedMemory,
                format!("a write under {ticket} reached memory that is not granted to it"),
            );
        }
    }

    /// Says when all that was posted on the connection is visible.
    pub(super) fn flush(&mut self, conn: usize, key: u64, epoch: u32) {
        let c = &mut self.net.connections[conn];
        let (source, waits) = (c.source, c.posted.clone());
        if !waits.is_empty() {
            c.flushes.push(Flush { key, epoch, waits });
        } else if !c.is_cut && c.sink_open {
            self.post(source, Event::Flushed { key, epoch });
        }
    }

    /// A link breaks: each side notices in its own time.
    pub(super) fn cut(&mut self, conn: usize) {
        let c = &mut self.net.connections[conn];
        c.is_cut = true;
        let sides = [c.source, c.sink];
        for side in sides {
            let at = self.clock.now() + ms(1) + self.draw(ms(400) as usize) as Time;
            self.clock.post(at, side, Event::ConnectionLost { conn });
        }
    }

    /// Connections of a process that died. Its peers hear of it soon, or by silence.
    pub(super) fn cut_all_of(&mut self, dead: Addr, silent: bool) {
        for conn in 0..self.net.connections.len() {
            if self.net.connections[conn].source == dead {
                self.close_source(conn);
            }
            let c = &mut self.net.connections[conn];
            let peer = match (c.source == dead, c.sink == dead) {
                (true, _) => c.sink,
                (_, true) => {
                    c.sink_open = false;
                    c.source
                }
                _ => continue,
            };
            let soon = if silent { ms(500) } else { ms(20) };
            let at = self.clock.now() + self.draw(soon as usize) as Time;
            self.clock.post(at, peer, Event::ConnectionLost { conn });
            if self.shape.lane == Lane::SharedMemory && self.net.connections[conn].source == dead {
                let at = at + self.draw(ms(300) as usize) as Time;
                self.clock.post(at, peer, Event::PeerDead { peer: dead });
            }
        }
    }

    /// A message arrives; only on a live connection between the two starts that opened it.
    pub(super) fn wire_arrives(&mut self, process: usize, conn: usize, wire: Wire) {
        let here = Addr { process, incarnation: self.procs[process].incarnation };
        let c = &self.net.connections[conn];
        if c.is_cut {
            return;
        }
        if c.source == here {
            if c.source_open {
                self.source_wire(process, conn, wire);
            }
            return;
        }
        if c.sink != here && !self.mutant.ignores_incarnations() {
            // Another start at the same address: the greeting says so.
            let source = c.source;
            if let Wire::Offer { handoff, .. } = wire {
                let reason = RefuseReason::WrongIncarnation;
                self.counts.add("sink refuses", reason.name());
                let refusal = Wire::Refuse { handoff, reason };
                self.post(source, Event::Wire { conn, wire: refusal });
            }
            return;
        }
        self.net.connections[conn].sink = here;
        if self.net.connections[conn].sink_open {
            self.sink_wire(process, conn, wire);
        }
    }
}
