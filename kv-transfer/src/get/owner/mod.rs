//! The owner of one get: its state machine with its I/O.

pub(crate) mod machine;

use crate::handler::{KeptBlocks, PinQuestion};
use crate::hazards::hazard;
use crate::message::{Message, Offer, checksum_messages};
use crate::plan::{LayerCopy, Move, check_blocks, got_from};
use crate::role::{Effect, Input, Link};
use crate::verify::work::{Verified, Work};
use crate::{HandoffFailure, RefuseReason, checksum};
use baton_types::{BlockTables, InstanceId, RequestId, TicketId, seeded};
use machine::{OwnerAction, OwnerInput};
use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether the hazard is set that confirms expired pins.
fn pretends(link: &Link<'_>) -> bool {
    hazard!(link.config, PretendedPins) || seeded!(ExpiredPinAdopted)
}

/// All writes of a get are in one epoch.
const EPOCH: u32 = 0;

pub(crate) struct Owner {
    machine: machine::Owner,
    /// The reader's number for the get.
    number: u64,
    request_id: RequestId,
    reader: InstanceId,
    /// Number of positions to get. Under the ticket, they count from the first one.
    moved: u32,
    /// The first of them that moves, by group.
    starts: Vec<u32>,
    deadline: Instant,
    blocks: Arc<BlockTables>,
    /// Dropped once no posted write reads the blocks.
    hold: Option<Arc<dyn Any + Send + Sync>>,
    /// What to write, where the reader asked for writes.
    moves: Option<Arc<Move>>,
}

impl Owner {
    /// Asks the worker for the blocks at once.
    pub(crate) fn new(
        offer: Offer,
        ticket: TicketId,
        proven: bool,
        link: &Link<'_>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) -> Self {
        let limits = &link.config.limits;
        let deadline = now + Duration::from_millis(u64::from(offer.deadline_ms).min(limits.pin_ms));
        // With the hazard, an expired pin is confirmed anyway.
        let confirm_by = if pretends(link) { deadline + Duration::from_secs(3600) } else { deadline };
        let ours = link.config.map.layout();
        let theirs = link.terms.map_or(ours, |terms| terms.map.layout());
        let starts = got_from(ours, theirs, offer.from, offer.tokens);
        let moved = offer.tokens - offer.from;
        let groups = ours.groups().iter().zip(&starts).filter(|(_, start)| **start < moved);
        let layers = groups.map(|(group, _)| group.layers.len()).sum();
        let Offer { handoff: number, request_id, sink: reader, name, from, tokens, .. } = offer;
        let by = reader.instance.clone();
        let question = PinQuestion { request_id: request_id.clone(), reader, proven, name, from, tokens, deadline };
        effects.push(Effect::Pin(question));
        Self {
            machine: machine::Owner::new(ticket, layers, confirm_by, limits.flush()),
            number,
            request_id,
            reader: by,
            moved,
            starts,
            deadline,
            blocks: Arc::default(),
            hold: None,
            moves: None,
        }
    }

    pub(crate) fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// The peer that gets.
    pub(crate) const fn reader(&self) -> &InstanceId {
        &self.reader
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn ticket(&self) -> TicketId {
        self.machine.ticket
    }

    pub(crate) fn accepts(message: &Message) -> bool {
        matches!(message, Message::Ask { .. } | Message::Confirm { .. } | Message::Unpin { .. })
    }

    pub(crate) fn handle(&mut self, input: Input, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let input = match input {
            Input::Pinned { blocks, hold } => match check_blocks(&link.config.map, &blocks, &self.starts, self.moved) {
                Ok(()) => {
                    self.blocks = Arc::new(blocks);
                    self.hold = Some(Arc::new(Mutex::new(hold)));
                    OwnerInput::Pinned
                }
                Err(detail) => {
                    tracing::error!(request_id = %self.request_id, detail, "the worker's pin does not fit the question");
                    OwnerInput::Refused { reason: RefuseReason::NoRoom, detail }
                }
            },
            Input::Refused { reason, detail } => OwnerInput::Refused { reason, detail },
            Input::Abort(HandoffFailure::Aborted(reason)) => OwnerInput::Revoked(reason),
            Input::Abort(_) => OwnerInput::Revoked("the instance is going away".into()),
            Input::Heard(Message::Ask { blocks, .. }) => {
                let fits = |map| check_blocks(map, &blocks, &self.starts, self.moved).is_ok();
                self.moves = match link.terms.is_some_and(|terms| fits(&terms.map)) {
                    true => link.outward(&self.blocks, &Arc::new(blocks)),
                    false => None,
                };
                match self.moves {
                    Some(_) => OwnerInput::Asked,
                    None => OwnerInput::Revoked("the reader's blocks cannot be".into()),
                }
            }
            Input::Heard(Message::Confirm { .. }) => {
                self.sum_late(link, effects);
                OwnerInput::Confirm
            }
            Input::Heard(_) => OwnerInput::Unpin,
            Input::Flushed { .. } => {
                self.sum_late(link, effects);
                OwnerInput::Written
            }
            Input::Verified(Verified::Summed { run, .. }) => OwnerInput::Summed(run),
            Input::Verified(Verified::Failed(error)) => OwnerInput::Revoked(HandoffFailure::from(error).to_string()),
            Input::Lost { .. } => OwnerInput::ConnectionLost,
            Input::Tick => {
                if pretends(link) && now >= self.deadline {
                    self.hold = None;
                }
                OwnerInput::Tick
            }
            _ => return,
        };
        self.feed(input, link, now, effects);
    }

    /// Carries out what the state machine decides.
    fn feed(&mut self, input: OwnerInput, link: &Link<'_>, now: Instant, effects: &mut Vec<Effect>) {
        let (ticket, handoff) = (self.machine.ticket, self.number);
        for action in self.machine.handle(now, input) {
            match action {
                OwnerAction::SendGrant => {
                    let blocks = BlockTables::clone(&self.blocks);
                    effects.push(Effect::Send(Message::Grant { handoff, ticket, blocks, from: 0 }));
                }
                OwnerAction::SendRefuse { reason, detail } => {
                    effects.push(Effect::Send(Message::Refuse { handoff, reason, detail }));
                }
                OwnerAction::Sum if pretends(link) => {}
                OwnerAction::Sum => self.sum(link, effects),
                OwnerAction::Write => self.write(effects),
                OwnerAction::Flush => effects.extend([Effect::CancelPuts, Effect::FlushPosted { epoch: EPOCH }]),
                OwnerAction::Disconnect => {
                    effects.push(Effect::Disconnect("the reader takes none of the writes of a get that is over"));
                }
                OwnerAction::SendHeld(runs) => {
                    let sums = runs.iter().map(|run| run.sums.len() as u64).sum();
                    effects.extend(checksum_messages(ticket, runs).map(Effect::Send));
                    effects.push(Effect::Send(Message::Held { ticket, algorithm: checksum::ALGORITHM, sums }));
                }
                OwnerAction::SendNotHeld(detail) => effects.push(Effect::Send(Message::NotHeld { ticket, detail })),
                OwnerAction::Forget => {
                    effects.extend(self.hold.take().map(|hold| Effect::LetGo(KeptBlocks::Read(hold))));
                    effects.push(Effect::Forget);
                }
            }
        }
    }

    /// Has the checksums of every layer computed. They need no hold: sums of blocks that are released meanwhile are never sent.
    fn sum(&self, link: &Link<'_>, effects: &mut Vec<Effect>) {
        let Some(cut) = link.terms.and_then(|terms| terms.outward.as_ref()) else { return };
        for (group, shape) in link.config.map.layout().groups().iter().enumerate() {
            let tokens = self.starts[group]..self.moved;
            let layers = if tokens.is_empty() { 0 } else { shape.layers.len() };
            for layer in 0..layers {
                let (tokens, blocks, heads) = (tokens.clone(), self.blocks.clone(), cut.source.clone());
                let work = Work::Sum { epoch: EPOCH, group, layer, tokens, blocks, heads, hold: Arc::new(()) };
                effects.push(Effect::Verify(work));
            }
        }
    }

    /// With the hazard, the checksums cover the bytes at the end of the get instead of those that were pinned.
    fn sum_late(&self, link: &Link<'_>, effects: &mut Vec<Effect>) {
        if pretends(link) {
            self.sum(link, effects);
        }
    }

    /// Queues writes of everything.
    fn write(&self, effects: &mut Vec<Effect>) {
        let (Some(moves), ticket) = (&self.moves, self.machine.ticket) else { return };
        let copies = LayerCopy::all_layers(moves, &self.starts, self.moved);
        effects.extend(copies.into_iter().map(|copy| Effect::Put { epoch: EPOCH, ticket, copy }));
        effects.push(Effect::Flush { epoch: EPOCH });
    }
}
