//! Who acts on what comes: commands of other threads, events of the transport, messages of peers.

use super::connections::{self, Greeting};
use super::inbox::Command;
use super::progress::Progress;
use crate::message::{Direction, Message};
use crate::transport::{ConnId, Event};
use crate::{Greetings, HandoffFailure, RefuseReason, Tickets};
use std::time::Instant;

impl Progress {
    pub(super) fn command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Open { key, peer, request, outcome } => self.open(key, peer, request, outcome, now),
            Command::Fetch { key, peer, request, outcome } => self.fetch(key, peer, request, outcome, now),
            Command::Launched { key, layer, tokens_end, fence } => self.launched(key, layer, tokens_end, fence, now),
            Command::Finish { key, commit } => self.finish_sending(key, commit, now),
            // A key is that of one handoff, whatever its direction.
            Command::Abort { key, reason } => {
                self.abort_fetch(key, HandoffFailure::Aborted(reason.clone()), now);
                self.abort(key, HandoffFailure::Aborted(reason), now);
            }
            Command::Summed { key, run, .. } if self.pins.contains_key(&key) => self.pin_summed(key, run, now),
            Command::Summed { key, epoch, run } => self.summed(key, epoch, run, now),
            Command::Granted { key, hold } => self.granted(key, hold, now),
            Command::Pinned { key, blocks, hold } => self.pinned(key, blocks, hold, now),
            Command::Refused { key, reason, detail } if self.pins.contains_key(&key) => {
                self.not_pinned(key, reason, detail, now);
            }
            Command::Refused { key, reason, detail } => self.refused(key, reason, detail, now),
            Command::Adopted { key, answer } => self.adopted(key, answer, now),
            Command::Checked { key, result } if self.fetches.contains_key(&key) => {
                self.fetch_checked(key, result, now);
            }
            Command::Checked { key, result } => self.checked(key, result, now),
            Command::CancelIncoming { keys, reason } => keys.into_iter().for_each(|key| {
                self.revoke(key, &reason, now);
                self.cancel_one(key, HandoffFailure::Aborted(reason.clone()), now);
            }),
            Command::PeerDead(party) => self.peer_is_dead(&party, now),
            Command::Stop(by) => {
                self.stopping = Some(by.min(self.stopping.unwrap_or(by)));
                self.give_up_all(now);
                self.incoming.keys().copied().collect::<Vec<_>>().into_iter().for_each(|key| {
                    self.cancel_one(key, HandoffFailure::Stopped, now);
                });
            }
        }
    }

    pub(super) fn event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Accepted { conn, proven } => self.accepted(conn, proven, now),
            Event::Message(conn, bytes) if self.is_too_long(conn, bytes.len()) => {
                self.close(conn, "a message longer than the peer may send");
            }
            Event::Message(conn, bytes) => match Message::decode(&bytes) {
                Ok(message) => self.message(conn, message, now),
                Err(error) => self.close(conn, &format!("a malformed message: {error}")),
            },
            Event::PutDone(conn, bytes) => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.pump.put_done(bytes);
                }
            }
            Event::Got(key, bytes) => self.got(key, bytes, now),
            Event::Flushed(conn, id) => self.flushed(conn, id, now),
            Event::Closed { conn, reason, fenced, unproven } => {
                if unproven {
                    self.rejected(conn, RefuseReason::Unproven, &reason, now);
                }
                self.closed(conn, &reason, fenced, now);
            }
            Event::PutRefused(conn) => self.count(conn, |stats| stats.puts_refused += 1),
        }
    }

    fn message(&mut self, conn: ConnId, message: Message, now: Instant) {
        let Some(connection) = self.connections.get(&conn).filter(|c| !c.closing) else { return };
        if let Some(key) = self.fetch_of(conn, &message) {
            return self.fetch_message(key, message, now);
        }
        match message {
            Message::Hello(hello) if matches!(connection.greeting, Greeting::Awaited(_)) => {
                self.greeted(conn, &hello, now);
            }
            Message::Welcome(hello) if matches!(connection.greeting, Greeting::Sent(_)) => {
                let is_meant = connection.party.as_ref() == Some(&hello.party)
                    || self.config.hooks.greetings() == Greetings::AnyIncarnation;
                if is_meant && connection.shard == hello.shard.index() {
                    self.greeted(conn, &hello, now);
                } else {
                    let detail = format!("{} answers there, its shard {}", hello.party, hello.shard.index());
                    self.rejected(conn, RefuseReason::WrongIncarnation, &detail, now);
                    self.close(conn, &detail);
                }
            }
            Message::Reject { reason, detail } if matches!(connection.greeting, Greeting::Sent(_)) => {
                self.rejected(conn, reason, &detail, now);
                self.close(conn, &detail);
            }
            _ if !matches!(connection.greeting, Greeting::Done(_)) => {
                self.close(conn, &format!("{} before the greeting", connections::kind_of(&message)));
            }
            Message::Hello(_) | Message::Welcome(_) | Message::Reject { .. } => self.close(conn, "a second greeting"),
            Message::Offer(offer) if offer.direction == Direction::Get => self.pin_asked(conn, *offer, now),
            Message::Offer(offer) => self.offered(conn, *offer, now),
            Message::Ask { .. } | Message::Confirm { .. } | Message::Unpin { .. } => {
                self.owner_message(conn, message, now);
            }
            Message::Checksums { .. } | Message::Commit(_) | Message::Aborted { .. } => {
                self.sink_message(conn, message, now);
            }
            Message::Grant { .. }
            | Message::Refuse { .. }
            | Message::Ack { .. }
            | Message::Nack { .. }
            | Message::Held { .. }
            | Message::NotHeld { .. }
            | Message::Abort { .. } => self.source_message(conn, message, now),
        }
    }

    /// Whether a message that came on `conn` may be about a ticket that was given on another connection: a ticket is between two
    /// incarnations, and so is a connection.
    pub(super) fn speaks_for(&self, conn: ConnId, given_on: ConnId) -> bool {
        conn == given_on || self.config.hooks.tickets() == Tickets::OfAnyone
    }

    /// The peer will have nothing to do with us.
    fn rejected(&mut self, conn: ConnId, reason: RefuseReason, detail: &str, now: Instant) {
        self.reject_handoffs(conn, reason, detail, now);
        let failure = HandoffFailure::Refused { reason, detail: detail.to_owned() };
        self.reject_fetches(conn, &failure, now);
    }

    /// Gives up everything that this side began, and lets go of what others read.
    pub(super) fn give_up_all(&mut self, now: Instant) {
        for key in self.sending.keys().copied().collect::<Vec<_>>() {
            self.abort(key, HandoffFailure::Stopped, now);
        }
        for key in self.fetches.keys().copied().collect::<Vec<_>>() {
            self.abort_fetch(key, HandoffFailure::Stopped, now);
        }
        for key in self.pins.keys().copied().collect::<Vec<_>>() {
            self.revoke(key, "the instance is going away", now);
        }
    }
}
