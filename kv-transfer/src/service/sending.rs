//! Handoffs being sent: carries out what their state machines decide.

use super::connections::Connection;
use super::inbox::OutcomeSender;
use super::progress::Progress;
use super::report::Report;
use crate::handoff::{Source, SourceAction, SourceInput};
use crate::message::{Commit, Direction, Message, Offer, SumRun};
use crate::plan::{check_blocks, check_from};
use crate::transport::ConnId;
use crate::{CommitPayload, HandoffFailure, OpenRequest, Peer, Phase, RefuseReason, TransferReport, checksum};
use baton_types::{Fence, FenceStatus, GroupBlocks, RequestId, TicketId};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most checksums in one message: a quarter of a mebibyte.
const SUMS_PER_MESSAGE: usize = 32 << 10;

/// Most fences of one handoff that are awaited at once: 4096 layers of 16 chunks.
const FENCES_MAX: usize = 1 << 16;

/// A handoff on its way out.
pub(super) struct Sending {
    pub(super) source: Source,
    request_id: RequestId,
    peer: Peer,
    tokens: u32,
    conn: ConnId,
    pub(super) blocks: Arc<GroupBlocks>,
    /// Dropped once neither a write nor a checksum reads the blocks; jobs of the checksum thread share it.
    pub(super) hold: Option<Arc<dyn Any + Send + Sync>>,
    outcome: Option<OutcomeSender>,
    offered: bool,
    pub(super) remote: Vec<Vec<baton_types::BlockId>>,
    /// Launched layers whose fences are not done, in order of launch.
    fences: VecDeque<(u32, u32, Fence)>,
    commit: Option<CommitPayload>,
    /// A phase that a test holds open, with what comes after it.
    held: Option<(Phase, Held)>,
    pub(super) report: Report,
}

/// What waits behind a held phase.
enum Held {
    Granted { ticket: TicketId, from: u32 },
    Commit { sums: u64, bytes: u64 },
}

impl Sending {
    pub(super) fn conn(&self) -> ConnId {
        self.conn
    }

    /// Whether something is awaited that cannot wake the progress thread.
    pub(super) fn is_watched(&self) -> bool {
        !self.fences.is_empty() || self.is_held()
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

impl Progress {
    pub(super) fn open(&mut self, key: u64, peer: Peer, request: OpenRequest, outcome: OutcomeSender, now: Instant) {
        let OpenRequest { request_id, tokens, blocks, deadline, hold } = request;
        if self.stopping.is_some() {
            self.inbox.outgoing_ended(key);
            outcome.send(Err(HandoffFailure::Stopped)).ok();
            return;
        }
        let conn = match self.connection_to(&peer, now) {
            Ok(conn) => conn,
            Err(detail) => {
                self.inbox.outgoing_ended(key);
                outcome.send(Err(HandoffFailure::PeerLost(detail))).ok();
                return;
            }
        };
        let deadline = deadline.min(now + Duration::from_millis(self.config.limits.handoff_ms));
        let (layout, limits) = (self.config.map.layout().clone(), &self.config.limits);
        let flush_wait = limits.flush();
        let sending = Sending {
            source: Source::new(layout, tokens, deadline, limits.epoch_bytes as u64, flush_wait),
            request_id,
            peer,
            tokens,
            conn,
            blocks: Arc::new(blocks),
            hold: Some(Arc::new(Mutex::new(hold))),
            outcome: Some(outcome),
            offered: false,
            remote: Vec::new(),
            fences: VecDeque::new(),
            commit: None,
            held: None,
            report: Report::default(),
        };
        self.sending.insert(key, sending);
        self.offer(key, now);
    }

    /// Sends the offer once the connection is greeted and no gate holds it.
    fn offer(&mut self, key: u64, now: Instant) {
        let Some(sending) = self.sending.get_mut(&key).filter(|s| !s.offered) else { return };
        match self.connections.get(&sending.conn).and_then(|c| c.usable()) {
            None => {}
            Some(Err(failure)) => self.source_input(key, SourceInput::Refused(failure), now),
            Some(Ok(())) if self.config.hooks.hold(Phase::Offer, &sending.request_id) => {}
            Some(Ok(())) if self.connections.get(&sending.conn).is_some_and(|c| c.cuts.is_none()) => {
                let failure = HandoffFailure::Protocol("the two shards have no KV heads in common".into());
                self.source_input(key, SourceInput::Refused(failure), now);
            }
            Some(Ok(())) => {
                sending.offered = true;
                let legs = self.connections.get(&sending.conn).map_or(1, |c| c.legs.1);
                let left = sending.source.deadline().saturating_duration_since(now).as_millis();
                let (conn, offer) = (
                    sending.conn,
                    Offer {
                        handoff: key,
                        request_id: sending.request_id.clone(),
                        source: self.config.party.clone(),
                        sink: sending.peer.party.clone(),
                        direction: Direction::Put,
                        shards: legs as u16,
                        from: 0,
                        tokens: sending.tokens,
                        deadline_ms: u32::try_from(left).unwrap_or(u32::MAX),
                        name: Vec::new(),
                    },
                );
                self.send(conn, &Message::Offer(Box::new(offer)));
            }
        }
    }

    /// Offers what waited for a connection's greeting.
    pub(super) fn offer_waiting(&mut self, conn: ConnId, now: Instant) {
        self.sources_on(conn).into_iter().for_each(|key| self.offer(key, now));
    }

    pub(super) fn launched(&mut self, key: u64, layer: u32, tokens_end: usize, fence: Fence, now: Instant) {
        if let Some(sending) = self.sending.get_mut(&key) {
            let tokens_end = u32::try_from(tokens_end).unwrap_or(u32::MAX);
            sending.fences.push_back((layer, tokens_end, fence));
            if sending.fences.len() > FENCES_MAX {
                return self.abort(key, HandoffFailure::Aborted("too many fences are awaited".into()), now);
            }
            self.poll_fences_of(key, now);
        }
    }

    pub(super) fn finish_sending(&mut self, key: u64, commit: CommitPayload, now: Instant) {
        let Some(sending) = self.sending.get_mut(&key) else { return };
        let fits = commit.tokens.len() >= sending.tokens as usize
            && commit.prompt_len as usize <= commit.tokens.len()
            && commit.tokens.len() <= CommitPayload::TOKENS_MAX
            && commit.extra.len() <= CommitPayload::EXTRA_BYTES_MAX;
        if !fits {
            let failure = HandoffFailure::Protocol("the commit does not name the tokens that were offered".into());
            return self.abort(key, failure, now);
        }
        sending.commit = Some(commit);
        self.poll_fences_of(key, now);
        self.source_input(key, SourceInput::Finish, now);
    }

    pub(super) fn abort(&mut self, key: u64, failure: HandoffFailure, now: Instant) {
        self.source_input(key, SourceInput::Abort(failure), now);
    }

    pub(super) fn summed(&mut self, key: u64, epoch: u32, run: SumRun, now: Instant) {
        self.source_input(key, SourceInput::Summed { epoch, run }, now);
    }

    /// Looks at every fence that is awaited; whether any was done.
    pub(super) fn poll_fences(&mut self, now: Instant) -> bool {
        let waiting: Vec<_> = self.sending.iter().filter(|(_, s)| !s.fences.is_empty()).map(|(&key, _)| key).collect();
        let done = waiting.into_iter().filter(|&key| self.poll_fences_of(key, now)).count();
        done > 0
    }

    fn poll_fences_of(&mut self, key: u64, now: Instant) -> bool {
        let mut any = false;
        while let Some((layer, tokens_end, fence)) = self.sending.get_mut(&key).and_then(|s| s.fences.front()) {
            let input = match fence.poll() {
                FenceStatus::Pending => break,
                FenceStatus::Done => SourceInput::LayerReady { layer: *layer, tokens_end: *tokens_end },
                FenceStatus::Failed => SourceInput::DeviceFailed,
            };
            any = true;
            if let Some(sending) = self.sending.get_mut(&key) {
                sending.fences.pop_front();
            }
            self.source_input(key, input, now);
        }
        any
    }

    /// A message of the sink.
    pub(super) fn source_message(&mut self, conn: ConnId, message: Message, now: Instant) {
        let by_ticket = |ticket: &TicketId| self.sending_tickets.get(&(conn, *ticket)).copied();
        let key = match &message {
            Message::Grant { handoff, .. } | Message::Refuse { handoff, .. } | Message::Abort { handoff, .. } => {
                Some(*handoff).filter(|key| self.sending.get(key).is_some_and(|s| s.conn == conn))
            }
            Message::Ack { ticket } | Message::Nack { ticket, .. } => by_ticket(ticket),
            _ => None,
        };
        let Some(key) = key else {
            self.count(conn, |stats| stats.stale_messages += 1);
            // A grant or abort for a handoff that ended: nothing is being written, and the sink waits to hear it.
            if let Message::Grant { handoff, ticket, .. } | Message::Abort { handoff, ticket, .. } = message {
                let detail = "the handoff ended".into();
                self.send(conn, &Message::Aborted { handoff, ticket, flushed: true, detail });
            }
            return;
        };
        match message {
            Message::Grant { ticket, blocks, from, .. } => self.grant_came(key, ticket, blocks, from, now),
            Message::Refuse { reason, detail, .. } => {
                self.source_input(key, SourceInput::Refused(HandoffFailure::Refused { reason, detail }), now);
            }
            Message::Abort { detail, .. } => self.source_input(key, SourceInput::AbortedBySink(detail), now),
            Message::Ack { .. } => self.source_input(key, SourceInput::Acked, now),
            Message::Nack { corrupt, detail, .. } => {
                let failure =
                    if corrupt { HandoffFailure::Corrupt(detail) } else { HandoffFailure::NotAdopted(detail) };
                self.source_input(key, SourceInput::Nacked(failure), now);
            }
            _ => {}
        }
    }

    fn grant_came(&mut self, key: u64, ticket: TicketId, blocks: GroupBlocks, from: u32, now: Instant) {
        let Some(sending) = self.sending.get_mut(&key) else { return };
        let (connection, tokens) = (self.connections.get(&sending.conn), sending.tokens);
        let parts = connection.is_some_and(Connection::moves_parts);
        let fits = match connection.and_then(|c| c.map.as_ref()) {
            None => Err("no pool".into()),
            Some(_) if from > 0 && !parts => Err("a part, in a protocol that has none".into()),
            Some(map) => check_blocks(map, &blocks.0, tokens).and_then(|()| check_from(map, from, tokens)),
        };
        if let Err(detail) = fits {
            let failure = HandoffFailure::Protocol(format!("the sink's grant cannot be: {detail}"));
            return self.abort(key, failure, now);
        }
        sending.remote = blocks.0;
        if let Some((cut, _)) = self.connections.get(&sending.conn).and_then(|c| c.cuts.as_ref()) {
            sending.source.cut(cut.token_bytes.clone());
        }
        sending.report.granted_at = Some(now);
        self.sending_tickets.insert((sending.conn, ticket), key);
        sending.held = Some((Phase::Puts, Held::Granted { ticket, from }));
        self.unhold(key, now);
    }

    /// Goes on behind a held phase, unless it is still held.
    fn unhold(&mut self, key: u64, now: Instant) {
        let Some(sending) = self.sending.get_mut(&key) else { return };
        let Some((phase, held)) = sending.held.take() else { return };
        if self.config.hooks.hold(phase, &sending.request_id) {
            sending.held = Some((phase, held));
            return;
        }
        match held {
            Held::Granted { ticket, from } => self.source_input(key, SourceInput::Granted { ticket, from }, now),
            Held::Commit { sums, bytes } => self.send_commit(key, sums, bytes),
        }
    }

    fn send_commit(&mut self, key: u64, sums: u64, bytes: u64) {
        let Some(sending) = self.sending.get_mut(&key) else { return };
        let (Some(ticket), Some(commit)) = (sending.source.ticket(), sending.commit.take()) else { return };
        let CommitPayload { tokens, prompt_len, extra } = commit;
        let (algorithm, conn) = (checksum::ALGORITHM, sending.conn);
        let commit = Commit { ticket, algorithm, sums, bytes, prompt_len, tokens, extra };
        self.send(conn, &Message::Commit(Box::new(commit)));
    }

    pub(super) fn tick_sending(&mut self, now: Instant) {
        for key in self.sending.keys().copied().collect::<Vec<_>>() {
            self.unhold(key, now);
            self.offer(key, now);
            self.source_input(key, SourceInput::Tick, now);
        }
    }

    pub(super) fn sources_lost(&mut self, conn: ConnId, reason: &str, now: Instant) {
        for key in self.sources_on(conn) {
            self.source_input(key, SourceInput::ConnectionLost(reason.to_owned()), now);
        }
    }

    /// The peer will have nothing to do with us.
    pub(super) fn reject_handoffs(&mut self, conn: ConnId, reason: RefuseReason, detail: &str, now: Instant) {
        for key in self.sources_on(conn) {
            let failure = HandoffFailure::Refused { reason, detail: detail.to_owned() };
            self.source_input(key, SourceInput::Refused(failure), now);
        }
    }

    fn sources_on(&self, conn: ConnId) -> Vec<u64> {
        self.sending.iter().filter(|(_, s)| s.conn == conn).map(|(&key, _)| key).collect()
    }

    pub(super) fn source_input(&mut self, key: u64, input: SourceInput, now: Instant) {
        let Some(sending) = self.sending.get_mut(&key) else { return };
        for action in sending.source.handle(now, input) {
            self.source_action(key, action, now);
        }
    }

    fn source_action(&mut self, key: u64, action: SourceAction, now: Instant) {
        let Some(sending) = self.sending.get_mut(&key) else { return };
        let (conn, ticket) = (sending.conn, sending.source.ticket());
        match action {
            SourceAction::Copy { epoch, group, layer, tokens } => self.copy(key, epoch, group, layer, tokens),
            SourceAction::Flush { epoch } => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    match epoch {
                        crate::handoff::source::ABORT_EPOCH => connection.pump.flush_posted(key, epoch),
                        _ => connection.pump.flush(key, epoch),
                    }
                }
            }
            SourceAction::Cancel => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.pump.cancel(key);
                }
            }
            SourceAction::SendChecksums(runs) => {
                let Some(ticket) = ticket else { return };
                for runs in messages_of(runs) {
                    self.send(conn, &Message::Checksums { ticket, runs });
                }
            }
            SourceAction::SendCommit { sums, bytes } => {
                sending.held = Some((Phase::Commit, Held::Commit { sums, bytes }));
                self.unhold(key, now);
            }
            SourceAction::SendAborted { flushed, detail } => {
                if sending.offered {
                    let ticket = ticket.unwrap_or(TicketId(0));
                    self.send(conn, &Message::Aborted { handoff: key, ticket, flushed, detail });
                }
            }
            SourceAction::Disconnect => {
                self.close(conn, "the peer takes none of the writes of a handoff that was given up")
            }
            SourceAction::ReleaseHold => sending.hold = None,
            SourceAction::Done(result) => self.sent(key, result, now),
        }
    }

    /// The end of a handoff.
    fn sent(&mut self, key: u64, result: Result<(), HandoffFailure>, now: Instant) {
        let Some(mut sending) = self.sending.remove(&key) else { return };
        self.inbox.outgoing_ended(key);
        self.sending_tickets.retain(|_, k| *k != key);
        let outcome = match &result {
            Ok(()) => "adopted",
            Err(failure) => failure.name(),
        };
        self.count(sending.conn, |stats| *stats.sent.entry(outcome).or_default() += 1);
        if let Err(failure) = &result {
            tracing::debug!(request_id = %sending.request_id, peer = %sending.peer.party, %failure, "handoff failed");
        }
        let lanes = self.connections.get(&sending.conn).map(|c| c.lanes.clone()).unwrap_or_default();
        let r = sending.report;
        let report = result.map(|()| TransferReport {
            bytes: r.bytes,
            tokens_moved: sending.source.tokens_moved(),
            puts: r.puts,
            granted_at: r.granted_at.unwrap_or(now),
            first_put_at: r.first_put_at.unwrap_or(now),
            last_put_at: r.last_put_at.unwrap_or(now),
            flushed_at: r.flushed_at.unwrap_or(now),
            moving: r.moving,
            acked_at: now,
            transport: self.transport.name(),
            lanes,
        });
        if let Some(outcome) = sending.outcome.take() {
            outcome.send(report).ok(); // Nobody asks any more: the owner dropped its end.
        }
    }
}

/// Cuts runs into messages of at most [`SUMS_PER_MESSAGE`] checksums; a run of one layer is never longer than a message may be.
pub(super) fn messages_of(runs: Vec<SumRun>) -> Vec<Vec<SumRun>> {
    let mut messages: Vec<Vec<SumRun>> = Vec::new();
    let mut sums = usize::MAX;
    for run in runs {
        if sums.saturating_add(run.sums.len()) > SUMS_PER_MESSAGE {
            messages.push(Vec::new());
            sums = 0;
        }
        sums += run.sums.len();
        messages.last_mut().expect("pushed at the first run").push(run);
    }
    messages
}
