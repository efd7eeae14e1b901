//! The sink of one put: its state machine with its I/O.

pub(crate) mod machine;

use crate::handler::{BlockHold, KeptBlocks, QuarantinedBlocks, ReserveOffer, SinkTimings, VerifiedHandoff};
use crate::hazards::hazard;
use crate::message::{Commit, Message, NackReason, Offer};
use crate::plan::{blocks_filled, check_blocks, check_from, first_moved};
use crate::role::{Counted, Effect, Input, Link};
use crate::verify::work::{Verified, Work};
use crate::window::Window;
use crate::{HandoffFailure, HoldPoint, Party, RefuseReason, checksum};
use baton_types::{BlockTables, InstanceId, KvLayout, TicketId};
use machine::{Expected, SinkAction, SinkInput};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) struct Sink {
    machine: machine::Sink,
    /// The request to the worker; sent once the bound on quarantined blocks allows it.
    offer: ReserveOffer,
    asked: bool,
    /// The source's number for the put.
    number: u64,
    blocks: Arc<BlockTables>,
    hold: Option<Box<dyn BlockHold>>,
    quarantined: Option<Box<dyn QuarantinedBlocks>>,
    offered_at: Instant,
    granted_at: Option<Instant>,
    committed_at: Option<Instant>,
    /// A commit that a test hook holds before it is processed.
    held: Option<Box<Commit>>,
}

impl Sink {
    pub(crate) fn new(offer: Offer, ticket: TicketId, link: &Link<'_>, now: Instant) -> Self {
        let limits = &link.config.limits;
        let deadline = now + Duration::from_millis(u64::from(offer.deadline_ms).min(limits.handoff_ms));
        let layout = link.config.map.layout();
        let cut = link.terms.and_then(|terms| terms.inward.as_ref());
        let token_bytes = cut.map_or(0, |cut| cut.bytes(layout));
        let expected = Expected { tokens: offer.tokens, token_bytes, algorithm: checksum::ALGORITHM };
        #[allow(unused_mut)] // Hazards are set.
        let mut machine = machine::Sink::new(ticket, layout, expected, deadline, limits.abort());
        #[cfg(any(test, feature = "testing"))]
        machine.leave_out(&link.config.hazards);
        Self {
            machine,
            number: offer.handoff,
            offer: ReserveOffer {
                request_id: offer.request_id,
                source: offer.source,
                tokens: offer.tokens,
                partial: link.terms.is_some_and(|terms| terms.moves_parts()),
                deadline,
                shard: link.terms.map_or(0, |terms| terms.shard),
                legs: offer.shards,
            },
            asked: false,
            blocks: Arc::default(),
            hold: None,
            quarantined: None,
            offered_at: now,
            granted_at: None,
            committed_at: None,
            held: None,
        }
    }

    pub(crate) fn source(&self) -> &Party {
        &self.offer.source
    }

    pub(crate) fn offer(&self) -> &ReserveOffer {
        &self.offer
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn ticket(&self) -> TicketId {
        self.machine.ticket
    }

    /// Whether it waits for the bound on quarantined blocks.
    pub(crate) fn waits(&self) -> bool {
        !self.asked
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    pub(crate) fn is_granted(&self) -> bool {
        self.machine.is_granted()
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.machine.is_quarantined()
    }

    /// The peer that writes, and the number of blocks that it may write, or could if everything were granted.
    pub(crate) fn at_stake(&self, layout: &KvLayout) -> (&InstanceId, usize) {
        let needed = blocks_filled(layout, self.machine.from(), self.offer.tokens).into_iter().sum::<usize>();
        (&self.offer.source.instance, needed.max(self.writable(layout)))
    }

    /// Number of blocks that the source may write: those granted, without those that were cached here before.
    pub(crate) fn writable(&self, layout: &KvLayout) -> usize {
        let kept = (self.machine.from() / layout.block_tokens()) as usize;
        self.blocks.0.iter().map(|table| table.end().saturating_sub(kept.max(table.first))).sum()
    }

    pub(crate) fn accepts(message: &Message) -> bool {
        matches!(message, Message::Checksums { .. } | Message::Commit(_) | Message::Aborted { .. })
    }

    pub(crate) fn handle(&mut self, input: Input, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        match input {
            Input::Admitted if !self.asked => {
                self.asked = true;
                effects.push(Effect::Reserve(self.offer.clone()));
            }
            Input::Barred(detail) => self.refuse(RefuseReason::Quarantine, detail, link, now, effects),
            Input::Granted(hold) => self.granted(hold, link, now, effects),
            Input::Refused { reason, detail } => self.refuse(reason, detail, link, now, effects),
            Input::Adopted(answer) => {
                if answer.is_ok() {
                    let bytes = self.machine.bytes();
                    effects.extend([Counted::Adopted(bytes), Counted::Sink("adopted")].map(Effect::Count));
                }
                self.feed(SinkInput::Delivered(answer), link, now, effects);
            }
            Input::Verified(Verified::Checked(Ok(sums))) => self.feed(SinkInput::Verified { sums }, link, now, effects),
            Input::Verified(Verified::Checked(Err(detail))) => {
                self.feed(SinkInput::Unverified(HandoffFailure::Corrupt(detail)), link, now, effects);
            }
            Input::Verified(Verified::Failed(error)) => {
                error.log(&self.offer.request_id);
                self.feed(SinkInput::Unverified(error.into()), link, now, effects);
            }
            Input::Heard(Message::Checksums { runs, .. }) => self.feed(SinkInput::Checksums(runs), link, now, effects),
            Input::Heard(Message::Commit(commit)) => {
                self.committed_at.get_or_insert(now);
                self.held = Some(commit);
                self.go_on(link, now, effects);
            }
            Input::Heard(Message::Aborted { flushed, detail, .. }) => {
                self.feed(SinkInput::Aborted { flushed, detail }, link, now, effects);
            }
            Input::WindowClosed => self.feed(SinkInput::WindowClosed, link, now, effects),
            Input::Abort(failure) => self.feed(SinkInput::Cancel(failure), link, now, effects),
            Input::Lost { fenced, detail } => {
                self.feed(SinkInput::ConnectionLost { fenced, detail }, link, now, effects);
            }
            Input::Fenced => self.feed(SinkInput::Fenced, link, now, effects),
            Input::Tick => {
                self.go_on(link, now, effects);
                self.feed(SinkInput::Tick, link, now, effects);
            }
            _ => {}
        }
    }

    /// The worker granted blocks.
    fn granted(&mut self, hold: Box<dyn BlockHold>, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let (map, tokens, from) = (&link.config.map, self.offer.tokens, hold.cached_tokens());
        let theirs = link.terms.map_or(map.layout(), |terms| terms.map.layout());
        let starts = first_moved(map.layout(), theirs, from, tokens);
        let fits = check_blocks(map, hold.blocks(), &starts, tokens).and_then(|()| check_from(map, from, tokens));
        let fits = fits.and_then(|()| match from > 0 && !self.offer.partial {
            true => Err(format!("{from} tokens are cached, and the source can leave out none")),
            false => Ok(()),
        });
        if let Err(detail) = fits {
            tracing::error!(request_id = %self.offer.request_id, detail, "the worker's grant does not fit the offer");
            return self.refuse(RefuseReason::NoRoom, detail, link, now, effects);
        }
        if let Some(cut) = link.terms.and_then(|terms| terms.inward.as_ref()) {
            let bytes = cut.bytes_from(map.layout(), &starts, tokens);
            self.machine.start_at(starts, bytes);
        }
        self.blocks = Arc::new(hold.blocks().clone());
        self.hold = Some(hold);
        self.granted_at = Some(now);
        self.feed(SinkInput::Granted { from }, link, now, effects);
    }

    fn refuse(
        &mut self,
        reason: RefuseReason,
        detail: String,
        link: &Link<'_>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        effects.push(Effect::Count(Counted::Refused(reason)));
        self.feed(SinkInput::Refused { reason, detail }, link, now, effects);
    }

    /// Processes a commit that came, unless a test hook holds it.
    fn go_on(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        if self.held.is_some() && !link.holds(HoldPoint::Verify, &self.offer.request_id) {
            let commit = self.held.take().expect("just looked at");
            self.feed(SinkInput::Commit(commit), link, now, effects);
        }
    }

    /// Carries out what the state machine decides.
    fn feed(&mut self, input: SinkInput, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let (ticket, handoff) = (self.machine.ticket, self.number);
        for action in self.machine.handle(now, input) {
            match action {
                SinkAction::SendGrant => {
                    let (blocks, from) = (BlockTables::clone(&self.blocks), self.machine.from());
                    let open_from = if hazard!(link.config, WindowsOfAllBlocks) { 0 } else { from };
                    let window = Window::granted(&link.config.map, &blocks, open_from);
                    effects.push(Effect::OpenWindow(ticket, window));
                    effects.push(Effect::Send(Message::Grant { handoff, ticket, blocks, from }));
                }
                SinkAction::SendRefuse { reason, detail } => {
                    effects.push(Effect::Send(Message::Refuse { handoff, reason, detail }));
                }
                SinkAction::Verify(runs) => {
                    let Some(cut) = link.terms.and_then(|terms| terms.inward.as_ref()) else { continue };
                    let (tokens, blocks, heads) = (self.offer.tokens, self.blocks.clone(), cut.sink.clone());
                    let unseen = hazard!(link.config, UnseenWrites);
                    effects.push(Effect::Verify(Work::Check { tokens, blocks, heads, runs, unseen }));
                }
                SinkAction::CloseWindow => effects.push(Effect::CloseWindow(ticket)),
                SinkAction::Deliver(commit) => self.deliver(*commit, now, effects),
                SinkAction::SendAck => effects.push(Effect::Send(Message::Ack { ticket })),
                SinkAction::SendNack(failure) => {
                    let (reason, detail) = match failure {
                        HandoffFailure::Corrupt(_) => (NackReason::Corrupt, failure.to_string()),
                        HandoffFailure::DeviceBusy(detail) => (NackReason::DeviceBusy, format!("the sink's: {detail}")),
                        HandoffFailure::Device(detail) => (NackReason::Device, format!("the sink's: {detail}")),
                        failure => (NackReason::NotAdopted, failure.to_string()),
                    };
                    let reason = reason.known_to(link.terms.map_or(0, |terms| terms.capabilities));
                    effects.push(Effect::Send(Message::Nack { ticket, reason, detail }));
                }
                SinkAction::SendAbort(detail) => {
                    effects.push(Effect::Send(Message::Abort { handoff, ticket, detail }));
                }
                SinkAction::Release => {
                    let blocks = self.hold.take().map(KeptBlocks::Granted);
                    effects.extend(blocks.map(|blocks| Effect::Release(ticket, blocks)));
                }
                SinkAction::Quarantine => {
                    self.quarantined = self.hold.take().map(BlockHold::quarantine);
                    effects.push(Effect::CloseWindow(ticket));
                    // The source did not acknowledge the abort. Failing its other handoffs on this connection costs less than losing the
                    // blocks.
                    if link.closing_fences {
                        let why = "the peer still holds blocks of a handoff that was given up";
                        effects.push(Effect::Disconnect(why));
                    }
                }
                SinkAction::ReleaseQuarantined => {
                    let blocks = self.quarantined.take().map(KeptBlocks::Quarantined);
                    effects.extend(blocks.map(|blocks| Effect::Release(ticket, blocks)));
                }
                SinkAction::Failed(failure) => {
                    let (request_id, peer) = (&self.offer.request_id, &self.offer.source);
                    tracing::debug!(%request_id, %peer, %failure, "put of a peer failed");
                    effects.push(Effect::Count(Counted::Sink(failure.name())));
                    effects.push(Effect::Failed(self.offer.clone(), failure));
                }
                SinkAction::Forget => effects.push(Effect::Forget),
            }
        }
    }

    /// Delivers the complete sequence to the worker.
    fn deliver(&mut self, commit: Commit, now: Instant, effects: &mut Vec<Effect>) {
        let Some(hold) = self.hold.take() else { return };
        let offer = &self.offer;
        effects.push(Effect::Deliver(Box::new(VerifiedHandoff {
            request_id: offer.request_id.clone(),
            source: offer.source.clone(),
            shard: offer.shard,
            ticket: self.machine.ticket,
            tokens: commit.tokens,
            prompt_len: commit.prompt_len,
            kv_tokens: offer.tokens,
            cached_tokens: self.machine.from(),
            extra: commit.extra,
            hold,
            bytes: self.machine.bytes(),
            timings: SinkTimings {
                offered_at: self.offered_at,
                granted_at: self.granted_at.unwrap_or(self.offered_at),
                committed_at: self.committed_at.unwrap_or(now),
                verified_at: now,
            },
        })));
    }
}
