//! Passes inputs to roles and carries out their effects.

use super::Driver;
use super::connections::{Connection, Connections};
use super::draining::{Left, Waiting};
use super::pump::Post;
use super::quarantine_bound::Admission;
use super::table::Role;
use crate::TransferConfig;
use crate::calls::{Call, Question};
use crate::handler::KeptBlocks;
use crate::hazards::hazard;
use crate::role::{Effect, HandoffKey, Input, Link};
use crate::transport::{ConnId, Transport};
use crate::verify::Job;
use baton_memory::MemoryError;
use baton_types::TicketId;
use std::sync::Arc;
use std::time::Instant;

/// Most writes and flushes that one turn posts on a connection, so that many short ones do not delay other connections.
const POSTS_MAX: usize = 512;

impl Driver {
    /// Something happened to one handoff.
    pub(super) fn input(&mut self, key: HandoffKey, input: Input, now: Instant) {
        let Some(entry) = self.table.get_mut(key) else { return };
        let (conn, mut effects) = (entry.conn, Vec::new());
        let link = link(&self.config, &*self.transport, &self.connections, conn, key);
        entry.role.handle(input, &link, now, &mut effects);
        effects.into_iter().for_each(|effect| self.perform(key, conn, effect, now));
    }

    pub(super) fn perform(&mut self, key: HandoffKey, conn: ConnId, effect: Effect, now: Instant) {
        let pump = self.connections.get_mut(conn).map(|connection| &mut connection.pump);
        match effect {
            Effect::Send(message) => self.send(conn, &message),
            Effect::Put { epoch, ticket, copy } => {
                if let Some(pump) = pump {
                    pump.put(key, epoch, ticket, copy);
                }
            }
            Effect::Flush { epoch } => pump.into_iter().for_each(|pump| pump.flush(key, epoch)),
            Effect::FlushPosted { epoch } => pump.into_iter().for_each(|pump| pump.flush_posted(key, epoch)),
            Effect::CancelPuts => pump.into_iter().for_each(|pump| pump.cancel(key)),
            Effect::Get(run) => self.transport.get(conn, key.0, run),
            Effect::OpenWindow(ticket, window) => self.transport.open_window(conn, ticket, window),
            Effect::CloseWindow(ticket) => self.close_window(conn, ticket, Waiting::Handoff(key), now),
            Effect::LetGo(blocks) => {
                let free = self.draining.release(conn, Left { blocks, written: None });
                self.reuse(free);
            }
            Effect::Release(ticket, blocks) => {
                let written = self.table.written(key, self.config.map.layout());
                self.close_window(conn, ticket, Waiting::Blocks(Left { blocks, written }), now);
            }
            Effect::Verify(work) => {
                let Some(entry) = self.table.get(key) else { return };
                let life = Arc::downgrade(&entry.life);
                self.verifier.submit(Job { inbox: self.inbox.clone(), key, life, work });
            }
            Effect::Disconnect(reason) => self.close(conn, reason),
            Effect::Await(ticket) => self.table.await_ticket(key, ticket),
            Effect::Admit { blocks } => {
                let Some(Role::Reader(reader)) = self.table.get(key).map(|entry| &entry.role) else { return };
                let peer = reader.owner().instance.clone();
                let answer = match self.admits(&peer, key, conn, blocks) {
                    (Admission::Ask, ..) => Input::Admitted,
                    (Admission::Wait | Admission::Refuse, _, max) => Input::Barred(format!(
                        "{peer} could leave more than {max} blocks in quarantine here, or has some there"
                    )),
                };
                self.input(key, answer, now);
            }
            Effect::Reserve(offer) => self.call(key, Question::Reserve(offer)),
            Effect::Pin(question) => self.call(key, Question::Pin(question)),
            Effect::Deliver(handoff) => self.call(key, Question::Adopt(handoff)),
            Effect::Failed(offer, failure) => self.call(key, Question::Failed(offer, failure)),
            Effect::Count(counted) => self.tally.counted(self.connections.party(conn), counted),
            Effect::Quarantined => self.inbox.begun_ended(key),
            Effect::Forget => match self.table.remove(key) {
                Some(Role::Source(_) | Role::Reader(_)) => self.inbox.begun_ended(key),
                Some(Role::Sink(sink)) => self.inbox.offer_ended(key, &sink.offer().request_id),
                Some(Role::Owner(owner)) => self.inbox.offer_ended(key, owner.request_id()),
                None => {}
            },
            // If the receiver is gone, the owner dropped its handle.
            Effect::PutEnded(to, outcome) => drop(to.send(outcome)),
            Effect::GetEnded(to, outcome) => drop(to.send(outcome)),
        }
    }

    /// Closes a window for what waits until no write under it is on its way.
    fn close_window(&mut self, conn: ConnId, ticket: TicketId, waiting: Waiting, now: Instant) {
        let is_open = self.connections.get(conn).is_some();
        if is_open {
            self.transport.close_window(conn, ticket);
        }
        match waiting {
            Waiting::Blocks(left) if hazard!(self.config, UndrainedWindows) => left.blocks.release(),
            Waiting::Handoff(key) if hazard!(self.config, UndrainedWindows) => {
                self.input(key, Input::WindowClosed, now);
            }
            waiting if is_open => self.draining.wait(conn, ticket, waiting),
            Waiting::Blocks(left) => {
                let free = self.draining.release(conn, left);
                self.reuse(free);
            }
            // The handoff knows that the connection is lost.
            Waiting::Handoff(_) => {}
        }
    }

    /// Returns blocks to the worker's pool. What a NIC stored in them must be visible before, or it would appear over the next KV there.
    pub(super) fn reuse(&mut self, free: impl IntoIterator<Item = KeptBlocks>) {
        let (read, written): (Vec<_>, Vec<_>) =
            free.into_iter().partition(|blocks| matches!(blocks, KeptBlocks::Read(_)));
        read.into_iter().for_each(KeptBlocks::release);
        if written.is_empty() {
            return;
        }
        match self.show_remote_writes() {
            Ok(()) => written.into_iter().for_each(KeptBlocks::release),
            Err(error) => {
                tracing::error!(%error, "the device does not show what was written to the blocks of a handoff; they stay unused");
                written.into_iter().for_each(std::mem::forget);
            }
        }
    }

    /// What NICs have stored is visible to the pool's device, except where a test leaves it unseen.
    pub(super) fn show_remote_writes(&self) -> Result<(), MemoryError> {
        match hazard!(self.config, UnseenWrites) {
            true => Ok(()),
            false => self.transport.show_remote_writes(),
        }
    }

    fn call(&mut self, key: HandoffKey, what: Question) {
        let waits = self.waiting_calls.wait(what.peer().clone());
        self.calls.submit(Call { inbox: self.inbox.clone(), key, what, waits });
    }

    /// Posts what each connection's credit allows, up to [`POSTS_MAX`]. Returns whether it posted anything.
    pub(super) fn post(&mut self, now: Instant) -> bool {
        let (mut posted, mut flushing) = (Vec::new(), Vec::new());
        let mut any = false;
        for (conn, connection) in self.connections.iter_mut() {
            for _ in 0..POSTS_MAX {
                let Some(post) = connection.pump.next() else { break };
                any = true;
                match post {
                    Post::Flush { id } => {
                        self.transport.flush(conn, id);
                        flushing.extend(connection.pump.covered());
                    }
                    Post::Put { key, epoch, ticket, run } => {
                        self.transport.put(conn, ticket, run);
                        posted.push((conn, key, Input::Posted { epoch, bytes: run.len }, run.len as u64));
                    }
                }
            }
        }
        for (conn, key, input, bytes) in posted {
            self.tally.count(self.connections.party(conn), |stats| {
                stats.puts += 1;
                stats.bytes_put += bytes;
            });
            self.input(key, input, now);
        }
        flushing.into_iter().for_each(|key| self.input(key, Input::Flushing, now));
        any
    }
}

/// What a role may read. Not a method, because the table is borrowed at the same time.
pub(super) fn link<'a>(
    config: &'a TransferConfig,
    transport: &dyn Transport,
    connections: &'a Connections,
    conn: ConnId,
    key: HandoffKey,
) -> Link<'a> {
    let connection = connections.get(conn);
    Link {
        key,
        config,
        terms: connection.and_then(Connection::terms),
        transport: transport.name(),
        lanes: connection.map_or("", |connection| &connection.lanes),
        closing_fences: transport.closing_fences(conn),
        one_sided_gets: transport.one_sided_gets(conn),
    }
}
