//! Handoffs being received: carries out what their state machines decide.

use super::checker::Job;
use super::connections::Connection;
use super::gathering::GatheringKey;
use super::progress::Progress;
use crate::handoff::{Sink, SinkAction, SinkInput};
use crate::message::{Commit, Message, Offer};
use crate::plan::{check_blocks, check_from, granted_ranges};
use crate::transport::ConnId;
use crate::{
    AdoptReply, BlockHold, HandoffFailure, Party, Phase, QuarantinedBlocks, RefuseReason, ReserveOffer, SinkTimings,
    VerifiedHandoff, Windows,
};
use baton_types::{GroupBlocks, KvLayout};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long bytes of a dead process may lie in receive queues of this one: far longer than one turn of the progress thread.
const DRAIN: Duration = Duration::from_millis(100);
/// The same for a progress thread that never finds nothing to do: long enough for every lane to have had its turn many times.
const DRAIN_BUSY: Duration = Duration::from_secs(5);

/// A handoff on its way in.
pub(super) struct Incoming {
    pub(super) sink: Sink,
    pub(super) offer: Offer,
    conn: ConnId,
    pub(super) blocks: Arc<GroupBlocks>,
    /// The leg whose blocks these are: this one, unless several arrive together.
    pub(super) first: u64,
    /// What the worker is to be asked, once the bound on what this peer could leave in quarantine has room for it.
    pub(super) unasked: Option<ReserveOffer>,
    hold: Option<Box<dyn BlockHold>>,
    quarantined: Option<Box<dyn QuarantinedBlocks>>,
    offered_at: Instant,
    granted_at: Option<Instant>,
    committed_at: Option<Instant>,
    /// A commit that a test holds before verification.
    held: Option<Box<Commit>>,
}

impl Incoming {
    pub(super) fn new(key: u64, sink: Sink, offer: Offer, conn: ConnId, now: Instant) -> Self {
        Self {
            sink,
            offer,
            conn,
            blocks: Arc::default(),
            first: key,
            unasked: None,
            hold: None,
            quarantined: None,
            offered_at: now,
            granted_at: None,
            committed_at: None,
            held: None,
        }
    }

    pub(super) fn gathering_key(&self) -> GatheringKey {
        (self.offer.request_id.clone(), self.offer.source.clone())
    }

    /// Blocks that its source may write: those granted, without what was cached here before.
    pub(super) fn writable(&self, layout: &KvLayout) -> usize {
        let kept = (self.sink.from() / layout.block_tokens()) as usize;
        self.blocks.0.iter().map(|group| group.len().saturating_sub(kept)).sum()
    }

    pub(super) fn conn(&self) -> ConnId {
        self.conn
    }

    pub(super) fn is_quarantined(&self) -> bool {
        self.sink.is_quarantined()
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

impl Progress {
    /// The worker gave blocks.
    pub(super) fn leg_granted(&mut self, key: u64, hold: Box<dyn BlockHold>, now: Instant) {
        let Some(incoming) = self.incoming.get_mut(&key) else { return };
        let (map, tokens, from) = (&self.config.map, incoming.offer.tokens, hold.cached_tokens());
        let parts = self.connections.get(&incoming.conn).is_some_and(Connection::moves_parts);
        let fits = check_blocks(map, &hold.blocks().0, tokens).and_then(|()| check_from(map, from, tokens));
        let fits = fits.and_then(|()| match from > 0 && !parts {
            true => Err(format!("{from} tokens are cached, and the source can leave out none")),
            false => Ok(()),
        });
        if let Err(detail) = fits {
            tracing::error!(request_id = %incoming.offer.request_id, detail, "the worker's grant does not fit the offer");
            return self.leg_refused(key, RefuseReason::NoRoom, detail, now);
        }
        incoming.blocks = Arc::new(hold.blocks().clone());
        incoming.hold = Some(hold);
        incoming.granted_at = Some(now);
        self.sink_input(key, SinkInput::Granted { from }, now);
    }

    pub(super) fn leg_refused(&mut self, key: u64, reason: RefuseReason, detail: String, now: Instant) {
        if let Some(incoming) = self.incoming.get(&key) {
            let conn = incoming.conn;
            self.count_refusal(conn, reason);
            self.sink_input(key, SinkInput::Refused { reason, detail }, now);
        }
    }

    pub(super) fn checked(&mut self, key: u64, result: Result<u64, String>, now: Instant) {
        let input = match result {
            Ok(sums) => SinkInput::Verified { sums },
            Err(detail) => SinkInput::Corrupt(detail),
        };
        self.sink_input(key, input, now);
    }

    pub(super) fn cancel_one(&mut self, key: u64, failure: HandoffFailure, now: Instant) {
        self.sink_input(key, SinkInput::Cancel(failure), now);
    }

    /// A message of the source.
    pub(super) fn sink_message(&mut self, conn: ConnId, message: Message, now: Instant) {
        let key = match &message {
            Message::Checksums { ticket, .. } => self.incoming_tickets.get(ticket),
            Message::Commit(commit) => self.incoming_tickets.get(&commit.ticket),
            // Before a grant a source knows only its own number. With a ticket, the two must agree.
            Message::Aborted { handoff, .. } => self.incoming_numbers.get(&(conn, *handoff)),
            _ => None,
        };
        let key = key.copied().filter(|key| self.incoming.get(key).is_some_and(|i| self.speaks_for(conn, i.conn)));
        let Some(key) = key else {
            self.count(conn, |stats| stats.stale_messages += 1);
            if let Message::Commit(commit) = message {
                let detail = "no such ticket is open between these two incarnations".into();
                self.send(conn, &Message::Nack { ticket: commit.ticket, corrupt: false, detail });
            }
            return;
        };
        match message {
            Message::Checksums { runs, .. } => self.sink_input(key, SinkInput::Checksums(runs), now),
            Message::Commit(commit) => {
                if let Some(incoming) = self.incoming.get_mut(&key) {
                    incoming.committed_at.get_or_insert(now);
                    incoming.held = Some(commit);
                }
                self.unhold_commit(key, now);
            }
            Message::Aborted { flushed, detail, .. } => {
                self.sink_input(key, SinkInput::Aborted { flushed, detail }, now);
            }
            _ => {}
        }
    }

    fn unhold_commit(&mut self, key: u64, now: Instant) {
        let Some(incoming) = self.incoming.get_mut(&key) else { return };
        if !incoming.is_held() || self.config.hooks.hold(Phase::Verify, &incoming.offer.request_id) {
            return;
        }
        if let Some(commit) = incoming.held.take() {
            self.sink_input(key, SinkInput::Commit(commit), now);
        }
    }

    pub(super) fn tick_incoming(&mut self, now: Instant) {
        for key in self.incoming.keys().copied().collect::<Vec<_>>() {
            self.unhold_commit(key, now);
            self.sink_input(key, SinkInput::Tick, now);
        }
        self.ask_waiting(now);
    }

    pub(super) fn sinks_lost(&mut self, conn: ConnId, reason: &str, fenced: bool, now: Instant) {
        let on: Vec<_> = self.incoming.iter().filter(|(_, i)| i.conn == conn).map(|(&key, _)| key).collect();
        for key in on {
            self.sink_input(key, SinkInput::ConnectionLost { fenced, detail: reason.to_owned() }, now);
        }
    }

    /// Nothing of this party runs any more. What its lanes still hold here is drained by closing them, then its blocks are free.
    pub(super) fn peer_is_dead(&mut self, party: &Party, now: Instant) {
        let of_party = |c: &Connection| c.party.as_ref() == Some(party);
        let conns: Vec<_> = self.connections.iter().filter(|(_, c)| of_party(c)).map(|(&id, _)| id).collect();
        for conn in conns {
            self.close(conn, "the peer's process is dead");
        }
        self.fencing.push((party.clone(), now));
    }

    /// Releases what dead parties could have written, once their connections are closed and a while passed in which whatever their
    /// lanes still held here was taken in: a shorter one where nothing is `moving`, so that nothing can be left.
    pub(super) fn fence_dead(&mut self, now: Instant, moving: bool) {
        let drain = if moving { DRAIN_BUSY } else { DRAIN };
        let connected = |party: &Party| self.connections.values().any(|c| c.party.as_ref() == Some(party));
        let drained = |(party, since): &(Party, Instant)| now - *since >= drain && !connected(party);
        let (fenced, left) = std::mem::take(&mut self.fencing).into_iter().partition::<Vec<_>, _>(drained);
        self.fencing = left;
        for (party, _) in fenced {
            let of_party: Vec<_> =
                self.incoming.iter().filter(|(_, i)| i.offer.source == party).map(|(&k, _)| k).collect();
            of_party.into_iter().for_each(|key| self.sink_input(key, SinkInput::Fenced, now));
            self.fetches_fenced(&party, now);
        }
    }

    fn sink_input(&mut self, key: u64, input: SinkInput, now: Instant) {
        let Some(incoming) = self.incoming.get_mut(&key) else { return };
        for action in incoming.sink.handle(now, input) {
            self.sink_action(key, action, now);
        }
    }

    fn sink_action(&mut self, key: u64, action: SinkAction, now: Instant) {
        let Some(incoming) = self.incoming.get_mut(&key) else { return };
        let (conn, ticket, handoff) = (incoming.conn, incoming.sink.ticket, incoming.offer.handoff);
        match action {
            SinkAction::SendGrant => {
                let (blocks, from) = (GroupBlocks::clone(&incoming.blocks), incoming.sink.from());
                let open_from = match self.config.hooks.windows() {
                    Windows::OfWhatIsMoved => from,
                    Windows::OfAllBlocks => 0,
                };
                self.transport.open_window(conn, ticket, granted_ranges(&self.config.map, &blocks.0, open_from));
                self.send(conn, &Message::Grant { handoff, ticket, blocks, from });
            }
            SinkAction::SendRefuse { reason, detail } => self.send(conn, &Message::Refuse { handoff, reason, detail }),
            SinkAction::Verify(runs) => {
                let Some((_, cut)) = self.connections.get(&conn).and_then(|c| c.cuts.as_ref()) else { return };
                let (tokens, blocks, heads) = (incoming.offer.tokens, incoming.blocks.clone(), cut.sink.clone());
                self.checker.submit(Job::Check { key, tokens, blocks, heads, runs });
            }
            SinkAction::Deliver(commit) => self.deliver(key, *commit, now),
            SinkAction::SendAck => self.send(conn, &Message::Ack { ticket }),
            SinkAction::SendNack(failure) => {
                let corrupt = matches!(failure, HandoffFailure::Corrupt(_));
                self.send(conn, &Message::Nack { ticket, corrupt, detail: failure.to_string() });
            }
            SinkAction::SendAbort(detail) => self.send(conn, &Message::Abort { handoff, ticket, detail }),
            SinkAction::Release => {
                incoming.hold = None;
                self.transport.close_window(conn, ticket);
            }
            SinkAction::Quarantine => {
                incoming.quarantined = incoming.hold.take().map(BlockHold::quarantine);
                self.transport.close_window(conn, ticket);
                // The source did not let go of them when told to. Losing what else it does here costs less than they do.
                if self.transport.closing_fences(conn) {
                    self.close(conn, "the peer still holds blocks of a handoff that was given up");
                }
            }
            SinkAction::ReleaseQuarantined => {
                if let Some(blocks) = incoming.quarantined.take() {
                    blocks.release();
                }
            }
            SinkAction::Failed(failure) => self.failed(key, &failure, now),
            SinkAction::Forget => self.forget(key),
        }
    }

    /// Gives what is whole to the worker; the blocks are those of `hold`, or of this leg where there is no other.
    pub(super) fn hand_on(&mut self, key: u64, commit: Commit, hold: Option<Box<dyn BlockHold>>, now: Instant) {
        let Some(incoming) = self.incoming.get_mut(&key) else { return };
        let Some(hold) = hold.or_else(|| incoming.hold.take()) else { return };
        self.transport.close_window(incoming.conn, incoming.sink.ticket);
        let (tokens, cached_tokens) = (incoming.offer.tokens, incoming.sink.from());
        let bytes = (self.config.map.layout().bytes_per_token() * (tokens - cached_tokens) as usize) as u64;
        let handoff = VerifiedHandoff {
            request_id: incoming.offer.request_id.clone(),
            source: incoming.offer.source.clone(),
            ticket: incoming.sink.ticket,
            tokens: commit.tokens,
            prompt_len: commit.prompt_len,
            kv_tokens: tokens,
            cached_tokens,
            extra: commit.extra,
            hold,
            bytes,
            timings: SinkTimings {
                offered_at: incoming.offered_at,
                granted_at: incoming.granted_at.unwrap_or(incoming.offered_at),
                committed_at: incoming.committed_at.unwrap_or(now),
                verified_at: now,
            },
        };
        let (reply, answer) = AdoptReply::new(self.inbox.clone(), key);
        self.handler.arrived(handoff, reply);
        if let Some(answer) = answer.now() {
            self.adopted(key, answer, now);
        }
    }

    /// What the worker said, told to one leg.
    pub(super) fn leg_adopted(&mut self, key: u64, answer: Result<(), String>, now: Instant) {
        let Some(incoming) = self.incoming.get(&key) else { return };
        let (conn, bytes) = (incoming.conn, incoming.sink.bytes());
        if answer.is_ok() {
            self.count(conn, |stats| {
                stats.bytes_adopted += bytes;
                *stats.received.entry("adopted").or_default() += 1;
            });
        }
        self.sink_input(key, SinkInput::Delivered(answer), now);
    }

    fn failed(&mut self, key: u64, failure: &HandoffFailure, now: Instant) {
        let Some(incoming) = self.incoming.get(&key) else { return };
        let (conn, request_id) = (incoming.conn, incoming.offer.request_id.clone());
        tracing::debug!(%request_id, peer = %incoming.offer.source, %failure, "incoming handoff failed");
        self.count(conn, |stats| *stats.received.entry(failure.name()).or_default() += 1);
        if self.leg_failed(key, failure, now) {
            self.handler.failed(&request_id, failure.clone());
        }
    }

    fn forget(&mut self, key: u64) {
        if let Some(incoming) = self.incoming.remove(&key) {
            self.inbox.offer_ended(key, &incoming.offer.request_id);
            self.leg_forgotten(key, &incoming.gathering_key());
            self.incoming_tickets.remove(&incoming.sink.ticket);
            self.incoming_numbers.remove(&(incoming.conn, incoming.offer.handoff));
            self.transport.close_window(incoming.conn, incoming.sink.ticket);
        }
    }
}
