//! The source of one put: its state machine with its I/O.

pub(crate) mod machine;

use crate::handler::KeptBlocks;
use crate::hazards::hazard;
use crate::message::{Commit, Direction, Message, NackReason, Offer, checksum_messages};
use crate::plan::{self, LayerCopy, Move, check_blocks, check_from, first_moved};
use crate::put::request::{CommitPayload, PutOutcome, PutReport, PutRequest};
use crate::put::timings::Timings;
use crate::role::{Counted, Effect, Input, Link, millis_left};
use crate::verify::work::{Verified, Work};
use crate::{HandoffFailure, HoldPoint, Party, TransferConfig, checksum};
use baton_types::{BlockTables, Fence, FenceStatus, RequestId, TicketId};
use machine::{ABORT_EPOCH, SourceAction, SourceInput};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Most fences of one put that may be pending: 4096 layers of 16 chunks.
const FENCES_MAX: usize = 1 << 16;

pub(crate) struct Source {
    machine: machine::Source,
    request_id: RequestId,
    sink: Party,
    tokens: u32,
    blocks: Arc<BlockTables>,
    /// Dropped once no write and no checksum reads the blocks; verifier jobs share it.
    hold: Option<Arc<dyn Any + Send + Sync>>,
    outcome: Option<oneshot::Sender<PutOutcome>>,
    offered: bool,
    /// What to move, as settled by the grant.
    moves: Option<Arc<Move>>,
    /// Launched layers whose fences are pending, in order of launch.
    fences: VecDeque<Launched>,
    commit: Option<CommitPayload>,
    held: Option<HeldStep>,
    timings: Timings,
}

/// One layer of one chunk.
struct Launched {
    layer: u32,
    tokens_end: u32,
    fence: Fence,
}

/// The step that waits while a test hook holds the put.
enum HeldStep {
    Granted { ticket: TicketId, from: u32 },
    Commit { sums: u64, bytes: u64 },
}

impl HeldStep {
    const fn point(&self) -> HoldPoint {
        match self {
            Self::Granted { .. } => HoldPoint::Puts,
            Self::Commit { .. } => HoldPoint::Commit,
        }
    }
}

impl Source {
    pub(crate) fn new(
        request: PutRequest,
        sink: Party,
        outcome: oneshot::Sender<PutOutcome>,
        config: &TransferConfig,
        now: Instant,
    ) -> Self {
        let PutRequest { request_id, tokens, blocks, deadline, hold } = request;
        let limits = &config.limits;
        let deadline = deadline.min(now + Duration::from_millis(limits.handoff_ms));
        let layout = config.map.layout().clone();
        Self {
            machine: machine::Source::new(layout, tokens, deadline, limits.epoch_bytes as u64, limits.flush()),
            request_id,
            sink,
            tokens,
            blocks: Arc::new(blocks),
            hold: Some(Arc::new(Mutex::new(hold))),
            outcome: Some(outcome),
            offered: false,
            moves: None,
            fences: VecDeque::new(),
            commit: None,
            held: None,
            timings: Timings::default(),
        }
    }

    /// Whether a test hook holds it.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Whether fences are pending; they cannot wake the driver.
    pub(crate) fn has_fences(&self) -> bool {
        !self.fences.is_empty()
    }

    /// Whether the first fence is done or has failed.
    pub(crate) fn is_fence_over(&self) -> bool {
        self.fences.front().is_some_and(|launched| !matches!(launched.fence.poll(), FenceStatus::Pending))
    }

    pub(crate) fn accepts(message: &Message) -> bool {
        matches!(
            message,
            Message::Grant { .. }
                | Message::Refuse { .. }
                | Message::Abort { .. }
                | Message::Ack { .. }
                | Message::Nack { .. }
        )
    }

    pub(crate) fn handle(&mut self, input: Input, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        match input {
            Input::Greeted => self.offer(link, now, effects),
            Input::Launched { layer, tokens_end, fence } => {
                let tokens_end = u32::try_from(tokens_end).unwrap_or(u32::MAX);
                self.fences.push_back(Launched { layer, tokens_end, fence });
                if self.fences.len() > FENCES_MAX {
                    let failure = HandoffFailure::Aborted("too many fences are awaited".into());
                    return self.feed(SourceInput::Abort(failure), link, now, effects);
                }
                self.poll_fences(link, now, effects);
            }
            Input::Grown(blocks) => {
                self.blocks = Arc::new(blocks);
                self.moves = self.moves.take().map(|moves| Arc::new(moves.with_source(&self.blocks)));
            }
            Input::Finish(commit) => self.finish(commit, link, now, effects),
            Input::Abort(failure) => self.feed(SourceInput::Abort(failure), link, now, effects),
            Input::Verified(Verified::Summed { epoch, run }) => {
                self.feed(SourceInput::Summed { epoch, run }, link, now, effects);
            }
            Input::Verified(Verified::Failed(error)) => {
                error.log(&self.request_id);
                self.feed(SourceInput::Abort(error.into()), link, now, effects);
            }
            Input::Heard(message) => self.on_message(message, link, now, effects),
            Input::Rejected(failure) => self.feed(SourceInput::Refused(failure), link, now, effects),
            Input::Posted { epoch, bytes } => self.timings.put(epoch, bytes, now),
            Input::Flushing => self.timings.flushing(now),
            Input::Idle => self.timings.idle(now),
            Input::Flushed { epoch } => {
                self.timings.flushed(epoch, now);
                self.feed(SourceInput::Flushed { epoch, ok: true }, link, now, effects);
            }
            Input::Lost { detail, .. } => self.feed(SourceInput::ConnectionLost(detail), link, now, effects),
            Input::Poll => self.poll_fences(link, now, effects),
            Input::Tick => {
                self.go_on(link, now, effects);
                self.offer(link, now, effects);
                self.feed(SourceInput::Tick, link, now, effects);
            }
            _ => {}
        }
    }

    /// Sends the offer once the connection is greeted and no test hook holds it.
    fn offer(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let Some(terms) = link.terms.filter(|_| !self.offered) else { return };
        if let Err(failure) = terms.check() {
            return self.feed(SourceInput::Refused(failure), link, now, effects);
        }
        if link.holds(HoldPoint::Offer, &self.request_id) {
            return;
        }
        if terms.outward.is_none() {
            let failure = HandoffFailure::Protocol("the two shards have no KV heads in common".into());
            return self.feed(SourceInput::Refused(failure), link, now, effects);
        }
        self.offered = true;
        let offer = Offer {
            handoff: link.key.0,
            request_id: self.request_id.clone(),
            source: link.config.party.clone(),
            sink: self.sink.clone(),
            direction: Direction::Put,
            shards: terms.legs_there,
            from: 0,
            tokens: self.tokens,
            deadline_ms: millis_left(self.machine.deadline(), now),
            name: Vec::new(),
        };
        effects.push(Effect::Send(Message::Offer(Box::new(offer))));
    }

    fn finish(&mut self, commit: CommitPayload, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let fits = commit.tokens.len() >= self.tokens as usize
            && commit.prompt_len as usize <= commit.tokens.len()
            && commit.tokens.len() <= CommitPayload::TOKENS_MAX
            && commit.extra.len() <= CommitPayload::EXTRA_BYTES_MAX;
        if !fits {
            let failure = HandoffFailure::Protocol("the commit does not name the tokens that were offered".into());
            return self.feed(SourceInput::Abort(failure), link, now, effects);
        }
        self.commit = Some(commit);
        self.poll_fences(link, now, effects);
        self.feed(SourceInput::Finish, link, now, effects);
    }

    fn poll_fences(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        while let Some(Launched { layer, tokens_end, fence }) = self.fences.front() {
            let input = match fence.poll() {
                FenceStatus::Pending if hazard!(link.config, EarlyReads) => {
                    SourceInput::LayerReady { layer: *layer, tokens_end: *tokens_end }
                }
                FenceStatus::Pending => break,
                FenceStatus::Done => SourceInput::LayerReady { layer: *layer, tokens_end: *tokens_end },
                FenceStatus::Failed => SourceInput::DeviceFailed,
            };
            self.fences.pop_front();
            self.feed(input, link, now, effects);
        }
    }

    fn on_message(&mut self, message: Message, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let input = match message {
            Message::Grant { ticket, blocks, from, .. } => match self.check_grant(&blocks, from, link) {
                Ok(()) => {
                    if let Some(cut) = link.terms.and_then(|terms| terms.outward.as_ref()) {
                        self.machine.cut(cut.token_bytes.clone());
                    }
                    if let Some(terms) = link.terms {
                        let (ours, theirs) = (link.config.map.layout(), terms.map.layout());
                        self.machine.start_at(first_moved(ours, theirs, from, self.tokens));
                    }
                    self.moves = link.outward(&self.blocks, &Arc::new(blocks));
                    self.timings.granted_at = Some(now);
                    effects.push(Effect::Await(ticket));
                    self.held = Some(HeldStep::Granted { ticket, from });
                    return self.go_on(link, now, effects);
                }
                Err(detail) => {
                    let failure = HandoffFailure::Protocol(format!("the sink's grant cannot be: {detail}"));
                    SourceInput::Abort(failure)
                }
            },
            Message::Refuse { reason, detail, .. } => SourceInput::Refused(HandoffFailure::Refused { reason, detail }),
            Message::Abort { detail, .. } => SourceInput::AbortedBySink(detail),
            Message::Ack { .. } => SourceInput::Acked,
            Message::Nack { reason, detail, .. } => SourceInput::Nacked(match reason {
                NackReason::NotAdopted => HandoffFailure::NotAdopted(detail),
                NackReason::Corrupt => HandoffFailure::Corrupt(detail),
                NackReason::DeviceBusy => HandoffFailure::DeviceBusy(detail),
                NackReason::Device => HandoffFailure::Device(detail),
            }),
            _ => return,
        };
        self.feed(input, link, now, effects);
    }

    fn check_grant(&self, blocks: &BlockTables, from: u32, link: &Link<'_>) -> Result<(), String> {
        let terms = link.terms.ok_or("no pool")?;
        if from > 0 && !terms.moves_parts() {
            return Err("a part, in a protocol that has none".into());
        }
        let starts = first_moved(link.config.map.layout(), terms.map.layout(), from, self.tokens);
        check_blocks(&terms.map, blocks, &starts, self.tokens)?;
        check_from(&terms.map, from, self.tokens)
    }

    /// Continues from where a test hook held it, unless it still does.
    fn go_on(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        match self.held.take_if(|held| !link.holds(held.point(), &self.request_id)) {
            Some(HeldStep::Granted { ticket, from }) => {
                self.feed(SourceInput::Granted { ticket, from }, link, now, effects);
            }
            Some(HeldStep::Commit { sums, bytes }) => {
                let (Some(ticket), Some(commit)) = (self.machine.ticket(), self.commit.take()) else { return };
                let CommitPayload { tokens, prompt_len, extra } = commit;
                let commit = Commit { ticket, algorithm: checksum::ALGORITHM, sums, bytes, prompt_len, tokens, extra };
                effects.push(Effect::Send(Message::Commit(Box::new(commit))));
            }
            None => {}
        }
    }

    /// Carries out what the state machine decides.
    fn feed(&mut self, input: SourceInput, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let mut lacks = false;
        for action in self.machine.handle(now, input) {
            let ticket = self.machine.ticket().unwrap_or(TicketId(0));
            match action {
                SourceAction::Copy { group, ref tokens, .. } if !self.holds(group, tokens, link) => lacks = true,
                SourceAction::Copy { epoch, group, layer, tokens } => {
                    self.copy(epoch, group, layer, tokens, effects);
                }
                SourceAction::Flush { epoch: ABORT_EPOCH } => effects.push(Effect::FlushPosted { epoch: ABORT_EPOCH }),
                SourceAction::Flush { epoch } => effects.push(Effect::Flush { epoch }),
                SourceAction::Cancel => effects.push(Effect::CancelPuts),
                SourceAction::SendChecksums(runs) => {
                    effects.extend(checksum_messages(ticket, runs).map(Effect::Send));
                }
                SourceAction::SendCommit { sums, bytes } => {
                    self.held = Some(HeldStep::Commit { sums, bytes });
                    self.go_on(link, now, effects);
                }
                SourceAction::SendAborted { flushed, detail } if self.offered => {
                    effects.push(Effect::Send(Message::Aborted { handoff: link.key.0, ticket, flushed, detail }));
                }
                SourceAction::SendAborted { .. } => {}
                SourceAction::Disconnect => {
                    let why = "the peer takes none of the writes of a handoff that was given up";
                    effects.push(Effect::Disconnect(why));
                }
                SourceAction::ReleaseHold => {
                    effects.extend(self.hold.take().map(|hold| Effect::LetGo(KeptBlocks::Read(hold))));
                }
                SourceAction::Done(result) => self.end(result, link, now, effects),
            }
        }
        if lacks {
            let failure = HandoffFailure::Aborted("a layer was launched for blocks that were not named".into());
            self.feed(SourceInput::Abort(failure), link, now, effects);
        }
    }

    /// Whether the blocks of a group hold these positions.
    fn holds(&self, group: usize, tokens: &Range<u32>, link: &Link<'_>) -> bool {
        let table = self.blocks.0.get(group);
        table.is_some_and(|table| plan::holds(&link.config.map, group, table, tokens, self.tokens))
    }

    /// Queues the writes of one copy, and has its checksums computed meanwhile.
    fn copy(&self, epoch: u32, group: usize, layer: usize, tokens: Range<u32>, effects: &mut Vec<Effect>) {
        let (Some(ticket), Some(hold), Some(moves)) = (self.machine.ticket(), &self.hold, &self.moves) else { return };
        let copy = LayerCopy::new(moves.clone(), group, layer, tokens.clone());
        effects.push(Effect::Put { epoch, ticket, copy });
        let (blocks, heads, hold) = (self.blocks.clone(), moves.source.heads.clone(), hold.clone());
        effects.push(Effect::Verify(Work::Sum { epoch, group, layer, tokens, blocks, heads, hold }));
    }

    fn end(&mut self, result: Result<(), HandoffFailure>, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let outcome = match &result {
            Ok(()) => "adopted",
            Err(failure) => {
                tracing::debug!(request_id = %self.request_id, peer = %self.sink, %failure, "put failed");
                failure.name()
            }
        };
        let timings = &self.timings;
        let report = result.map(|()| PutReport {
            bytes: timings.bytes,
            tokens_moved: self.machine.tokens_moved(),
            puts: timings.puts,
            granted_at: timings.granted_at.unwrap_or(now),
            first_put_at: timings.first_put_at.unwrap_or(now),
            flushed_at: timings.flushed_at.unwrap_or(now),
            moving: timings.moving,
            acked_at: now,
            transport: link.transport,
            lanes: link.lanes.to_owned(),
        });
        effects.extend([Effect::Count(Counted::Source(outcome)), Effect::Forget]);
        effects.extend(self.outcome.take().map(|to| Effect::PutEnded(to, report)));
    }
}
