//! The reader of one get: its state machine with its I/O.

pub(crate) mod machine;

use crate::get::request::{GetOutcome, GetReport, GetRequest};
use crate::handler::{BlockHold, KeptBlocks, QuarantinedBlocks};
use crate::hazards::hazard;
use crate::message::{Direction, Message, Offer};
use crate::plan::{LayerCopy, check_blocks, got_from};
use crate::role::{Counted, Effect, Input, Link, millis_left};
use crate::verify::work::{Verified, Work};
use crate::window::Window;
use crate::{HandoffFailure, HoldPoint, Party, RefuseReason, TransferConfig, checksum};
use baton_types::{BlockTables, InstanceId, RequestId, TicketId};
use machine::{ReaderAction, ReaderInput};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

pub(crate) struct Reader {
    machine: machine::Reader,
    request_id: RequestId,
    name: Vec<u8>,
    owner: Party,
    /// First position to get, and how many. Under the ticket, positions count from the first one.
    from: u32,
    moved: u32,
    /// The first of them that moves, by group; known with the greeting.
    starts: Vec<u32>,
    blocks: Arc<BlockTables>,
    /// Keeps `blocks` reserved until nothing writes to them any more.
    hold: Option<Box<dyn BlockHold>>,
    quarantined: Option<Box<dyn QuarantinedBlocks>>,
    outcome: Option<oneshot::Sender<GetOutcome>>,
    offered: bool,
    /// The ticket under which the owner may write, once it was asked to.
    window: Option<TicketId>,
    /// A grant that a test hook holds before anything is read, or that waits for admission.
    held: Option<TicketId>,
    /// Blocks of the owner, once it granted them.
    remote: Arc<BlockTables>,
    /// One-sided reads that are not posted yet, and bytes of those in flight.
    copies: VecDeque<LayerCopy>,
    in_flight: usize,
}

impl Reader {
    pub(crate) fn new(
        request: GetRequest,
        owner: Party,
        outcome: oneshot::Sender<GetOutcome>,
        config: &TransferConfig,
        now: Instant,
    ) -> Self {
        let GetRequest { request_id, name, from, tokens, blocks, deadline, hold } = request;
        let deadline = deadline.min(now + Duration::from_millis(config.limits.handoff_ms));
        let (layout, wait, moved) = (config.map.layout(), config.limits.abort(), tokens - from);
        let starts = vec![0; layout.groups().len()];
        #[allow(unused_mut)] // Hazards are set.
        let mut machine = machine::Reader::new(layout, moved, checksum::ALGORITHM, deadline, wait);
        #[cfg(any(test, feature = "testing"))]
        machine.leave_out(&config.hazards);
        Self {
            machine,
            request_id,
            name,
            owner,
            from,
            moved,
            starts,
            blocks: Arc::new(blocks),
            hold: Some(hold),
            quarantined: None,
            outcome: Some(outcome),
            offered: false,
            window: None,
            held: None,
            remote: Arc::default(),
            copies: VecDeque::new(),
            in_flight: 0,
        }
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    pub(crate) fn owner(&self) -> &Party {
        &self.owner
    }

    /// The peer that may write here, and to how many blocks.
    pub(crate) fn at_stake(&self) -> (&InstanceId, usize) {
        (&self.owner.instance, self.blocks.total())
    }

    /// Whether the owner may write to its blocks.
    pub(crate) fn is_open(&self) -> bool {
        self.machine.is_open()
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.machine.is_quarantined()
    }

    pub(crate) fn accepts(message: &Message) -> bool {
        matches!(
            message,
            Message::Grant { .. }
                | Message::Refuse { .. }
                | Message::Checksums { .. }
                | Message::Held { .. }
                | Message::NotHeld { .. }
        )
    }

    pub(crate) fn handle(&mut self, input: Input, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let input = match input {
            Input::Greeted => return self.offer(link, now, effects),
            Input::Abort(failure) => ReaderInput::Abort(failure),
            Input::Heard(message) => match self.on_message(message, link, effects) {
                Some(input) => input,
                None => return self.go_on(link, now, effects),
            },
            Input::Rejected(failure) => ReaderInput::Refused(failure),
            Input::Admitted => match self.held.take() {
                Some(ticket) => ReaderInput::Granted { ticket, by_itself: false },
                None => return,
            },
            Input::Barred(detail) => {
                self.held = None;
                ReaderInput::Abort(HandoffFailure::Refused { reason: RefuseReason::Quarantine, detail })
            }
            Input::Verified(Verified::Checked(Ok(sums))) => ReaderInput::Verified { sums },
            Input::Verified(Verified::Checked(Err(detail))) => ReaderInput::Unverified(HandoffFailure::Corrupt(detail)),
            Input::Verified(Verified::Failed(error)) => {
                error.log(&self.request_id);
                ReaderInput::Unverified(error.into())
            }
            Input::Got { bytes } => {
                self.in_flight -= bytes;
                return self.post(link, now, effects);
            }
            Input::WindowClosed => ReaderInput::WindowClosed,
            Input::Lost { fenced, detail } => ReaderInput::ConnectionLost { fenced, detail },
            Input::Fenced => ReaderInput::Fenced,
            Input::Tick => {
                self.go_on(link, now, effects);
                ReaderInput::Tick
            }
            _ => return,
        };
        self.feed(input, link, now, effects);
    }

    /// Sends the offer once the connection is greeted.
    fn offer(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let Some(terms) = link.terms.filter(|_| !self.offered) else { return };
        let part = || terms.check_part(self.from, self.moved).map_err(HandoffFailure::WholeOnly);
        if let Err(failure) = terms.check().and_then(|()| part()) {
            return self.feed(ReaderInput::Refused(failure), link, now, effects);
        }
        let ours = link.config.map.layout();
        self.starts = got_from(ours, terms.map.layout(), self.from, self.from + self.moved);
        if let Err(detail) = check_blocks(&link.config.map, &self.blocks, &self.starts, self.moved) {
            let failure = HandoffFailure::Protocol(format!("this side's blocks cannot be: {detail}"));
            return self.feed(ReaderInput::Refused(failure), link, now, effects);
        }
        self.machine.start_at(ours, &self.starts, self.moved);
        self.offered = true;
        let offer = Offer {
            handoff: link.key.0,
            request_id: self.request_id.clone(),
            source: self.owner.clone(),
            sink: link.config.party.clone(),
            direction: Direction::Get,
            shards: 1,
            from: self.from,
            tokens: self.from + self.moved,
            deadline_ms: millis_left(self.machine.deadline(), now),
            name: self.name.clone(),
        };
        effects.push(Effect::Send(Message::Offer(Box::new(offer))));
    }

    fn on_message(&mut self, message: Message, link: &Link<'_>, effects: &mut Vec<Effect>) -> Option<ReaderInput> {
        Some(match message {
            Message::Grant { from: 1.., .. } => {
                let failure = HandoffFailure::Protocol("the owner leaves out what was asked for".into());
                ReaderInput::Abort(failure)
            }
            Message::Grant { ticket, blocks, .. } => {
                let fits = link.terms.ok_or("no pool".to_owned());
                match fits.and_then(|terms| check_blocks(&terms.map, &blocks, &self.starts, self.moved)) {
                    Ok(()) => {
                        (self.remote, self.held) = (Arc::new(blocks), Some(ticket));
                        effects.push(Effect::Await(ticket));
                        return None;
                    }
                    Err(detail) => {
                        let failure = HandoffFailure::Protocol(format!("the owner's blocks cannot be: {detail}"));
                        ReaderInput::Abort(failure)
                    }
                }
            }
            Message::Refuse { reason, detail, .. } => ReaderInput::Refused(HandoffFailure::Refused { reason, detail }),
            Message::Checksums { runs, .. } => ReaderInput::Checksums(runs),
            Message::Held { algorithm, sums, .. } => ReaderInput::Held { algorithm, sums },
            Message::NotHeld { detail, .. } => ReaderInput::NotHeld(detail),
            _ => return None,
        })
    }

    /// Starts to get what was granted, unless a test hook holds it. Where the owner is to write, it must be admitted first.
    fn go_on(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        if self.held.is_none() || link.holds(HoldPoint::Gets, &self.request_id) {
            return;
        }
        if !link.one_sided_gets {
            effects.push(Effect::Admit { blocks: self.blocks.total() });
        } else if let Some(ticket) = self.held.take() {
            self.feed(ReaderInput::Granted { ticket, by_itself: true }, link, now, effects);
        }
    }

    /// Posts reads within the credit, and detects when all have ended.
    fn post(&mut self, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let max = link.config.limits.in_flight_bytes_max;
        while let Some(copy) = self.copies.front_mut() {
            let Some(run) = copy.peek() else {
                self.copies.pop_front();
                continue;
            };
            if self.in_flight > 0 && self.in_flight + run.len > max {
                break;
            }
            copy.next();
            self.in_flight += run.len;
            effects.push(Effect::Get(run));
        }
        if self.copies.is_empty() && self.in_flight == 0 {
            self.feed(ReaderInput::Read, link, now, effects);
        }
    }

    /// Carries out what the state machine decides.
    fn feed(&mut self, input: ReaderInput, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let mut posts = false;
        for action in self.machine.handle(now, input) {
            let ticket = self.machine.ticket().unwrap_or(TicketId(0));
            match action {
                ReaderAction::Read => {
                    self.queue_copies(link);
                    posts = true;
                }
                ReaderAction::SendAsk => {
                    let blocks = BlockTables::clone(&self.blocks);
                    self.window = Some(ticket);
                    effects.push(Effect::OpenWindow(ticket, Window::granted(&link.config.map, &blocks, 0)));
                    effects.push(Effect::Send(Message::Ask { ticket, blocks }));
                }
                ReaderAction::CloseWindow => effects.push(Effect::CloseWindow(ticket)),
                ReaderAction::SendConfirm => effects.push(Effect::Send(Message::Confirm { ticket })),
                ReaderAction::Verify(runs) => {
                    let Some(cut) = link.terms.and_then(|terms| terms.inward.as_ref()) else { continue };
                    let (tokens, blocks, heads) = (self.moved, self.blocks.clone(), cut.sink.clone());
                    let unseen = hazard!(link.config, UnseenWrites);
                    effects.push(Effect::Verify(Work::Check { tokens, blocks, heads, runs, unseen }));
                }
                ReaderAction::SendUnpin => {
                    self.copies.clear();
                    if self.offered {
                        effects.push(Effect::Send(Message::Unpin { handoff: link.key.0 }));
                    }
                    posts = true;
                }
                ReaderAction::Disconnect => {
                    effects.push(Effect::Disconnect("the peer does not let go of a get that was given up"));
                }
                ReaderAction::Failed(failure) => {
                    let (request_id, peer) = (&self.request_id, &self.owner);
                    tracing::debug!(%request_id, %peer, %failure, "get failed");
                    self.end(Err(failure), effects);
                }
                ReaderAction::Adopt => {
                    let bytes = self.bytes(link);
                    if let Some(hold) = self.hold.take() {
                        self.end(Ok(GetReport { bytes, hold }), effects);
                    }
                }
                // Its blocks count against the bound on quarantined ones from here on.
                ReaderAction::Quarantine => {
                    self.quarantined = self.hold.take().map(BlockHold::quarantine);
                    effects.push(Effect::Quarantined);
                }
                ReaderAction::Forget => {
                    let blocks = self.quarantined.take().map(KeptBlocks::Quarantined);
                    let blocks = blocks.or_else(|| self.hold.take().map(KeptBlocks::Granted));
                    effects.extend(blocks.map(|blocks| match self.window {
                        Some(ticket) => Effect::Release(ticket, blocks),
                        // The owner was not asked to write to them, but this side may have read into them.
                        None => Effect::LetGo(blocks),
                    }));
                    effects.push(Effect::Forget);
                }
            }
        }
        if posts {
            self.post(link, now, effects);
        }
    }

    /// KV bytes that move.
    fn bytes(&self, link: &Link<'_>) -> u64 {
        let groups = link.config.map.layout().groups().iter().zip(&self.starts);
        let bytes = groups
            .map(|(group, start)| group.layers.len() * group.token_bytes() * group.rows((*start..self.moved).len()));
        bytes.sum::<usize>() as u64
    }

    fn queue_copies(&mut self, link: &Link<'_>) {
        if let Some(moves) = link.inward(&self.blocks, &self.remote) {
            self.copies.extend(LayerCopy::all_layers(&moves, &self.starts, self.moved));
        }
    }

    /// Reports the outcome to the worker, and accepts no further writes.
    fn end(&mut self, result: GetOutcome, effects: &mut Vec<Effect>) {
        effects.extend(self.window.map(Effect::CloseWindow));
        let name = match &result {
            Ok(_) => "adopted",
            Err(failure) => failure.name(),
        };
        effects.push(Effect::Count(Counted::Reader(name)));
        effects.extend(self.outcome.take().map(|to| Effect::GetEnded(to, result)));
    }
}
