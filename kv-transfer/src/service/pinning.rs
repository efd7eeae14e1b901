//! Gets whose blocks are this instance's: carries out what their state machines decide.

use super::checker::Job;
use super::fetching::check_part;
use super::progress::Progress;
use super::sending::messages_of;
use crate::handoff::{Owner, OwnerAction, OwnerInput};
use crate::message::{Message, Offer, SumRun};
use crate::plan::{Side, check_blocks, check_from, copies};
use crate::transport::ConnId;
use crate::{PinQuestion, PinReply, Pinning, RefuseReason, checksum};
use baton_types::{GroupBlocks, RequestId, TicketId};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pins by key.
pub(super) type Pins = BTreeMap<u64, Pin>;

/// One pin, asked for or given.
pub(super) struct Pin {
    owner: Owner,
    /// The reader's number of the get.
    handoff: u64,
    request_id: RequestId,
    /// How many positions are read. Under the ticket, they count from the first one.
    moved: u32,
    conn: ConnId,
    deadline: Instant,
    blocks: Arc<GroupBlocks>,
    hold: Option<Box<dyn Any + Send>>,
    /// The reader's blocks, where it asked to be written to.
    remote: Vec<Vec<baton_types::BlockId>>,
}

impl Pin {
    pub(super) fn conn(&self) -> ConnId {
        self.conn
    }
}

impl Progress {
    /// A peer asks to read.
    pub(super) fn pin_asked(&mut self, conn: ConnId, offer: Offer, now: Instant) {
        let handoff = offer.handoff;
        if let Err((reason, detail)) = self.check_get(conn, &offer) {
            return self.send(conn, &Message::Refuse { handoff, reason, detail });
        }
        let pretended = self.config.hooks.pinning() == Pinning::Pretended;
        let deadline = now + Duration::from_millis(u64::from(offer.deadline_ms).min(self.config.limits.pin_ms));
        // The hazard itself: what has expired is confirmed all the same.
        let confirm_by = if pretended { deadline + Duration::from_secs(3600) } else { deadline };
        let key = self.inbox.offer(&offer.request_id);
        let layers = self.config.map.layout().groups().iter().map(|group| group.layers.len()).sum();
        let pin = Pin {
            owner: Owner::new(self.new_ticket(), layers, confirm_by, self.config.limits.flush()),
            handoff,
            request_id: offer.request_id.clone(),
            moved: offer.tokens - offer.from,
            conn,
            deadline,
            blocks: Arc::default(),
            hold: None,
            remote: Vec::new(),
        };
        self.pins.insert(key, pin);
        let Offer { request_id, sink: reader, name, from, tokens, .. } = offer;
        let proven = self.connections.get(&conn).is_some_and(|c| c.proven);
        let question = PinQuestion { request_id, reader, proven, name, from, tokens, deadline };
        self.handler.pin(question, PinReply::new(self.inbox.clone(), key));
    }

    fn check_get(&self, conn: ConnId, offer: &Offer) -> Result<(), (RefuseReason, String)> {
        self.check_peer(conn, &offer.source, &offer.sink)?;
        if self.connections.get(&conn).is_none_or(|c| c.shard != self.config.shard.index() || c.legs != (1, 1)) {
            return Err((RefuseReason::Protocol, "gets between shards that hold other heads are not served".into()));
        }
        let twice = self.pins.values().any(|pin| (pin.conn, pin.handoff) == (conn, offer.handoff));
        if twice || offer.shards != 1 || offer.tokens == 0 {
            return Err((RefuseReason::Protocol, "not its first offer, or of nothing that is served".into()));
        }
        let here = check_from(&self.config.map, offer.from, offer.tokens);
        let both = here.and_then(|()| check_part(offer.from, offer.tokens - offer.from, self.connections.get(&conn)));
        if let Err(detail) = both {
            return Err((RefuseReason::Protocol, detail));
        }
        if self.pins.len() >= self.config.limits.incoming_max {
            return Err((RefuseReason::Busy, format!("{} gets are open", self.pins.len())));
        }
        Ok(())
    }

    /// The worker pinned blocks.
    pub(super) fn pinned(&mut self, key: u64, blocks: GroupBlocks, hold: Box<dyn Any + Send>, now: Instant) {
        let Some(pin) = self.pins.get_mut(&key) else { return };
        if let Err(detail) = check_blocks(&self.config.map, &blocks.0, pin.moved) {
            tracing::error!(request_id = %pin.request_id, detail, "the worker's pin does not fit the question");
            return self.owner_input(key, OwnerInput::Refused { reason: RefuseReason::NoRoom, detail }, now);
        }
        (pin.blocks, pin.hold) = (Arc::new(blocks), Some(hold));
        self.owner_input(key, OwnerInput::Pinned, now);
    }

    pub(super) fn not_pinned(&mut self, key: u64, reason: RefuseReason, detail: String, now: Instant) {
        self.owner_input(key, OwnerInput::Refused { reason, detail }, now);
    }

    /// A message of the reader.
    pub(super) fn owner_message(&mut self, conn: ConnId, message: Message, now: Instant) {
        let key = self.pins.iter().find(|(_, pin)| {
            pin.conn == conn
                && match &message {
                    Message::Ask { ticket, .. } | Message::Confirm { ticket } => pin.owner.ticket == *ticket,
                    Message::Unpin { handoff } => pin.handoff == *handoff,
                    _ => false,
                }
        });
        let Some((&key, pin)) = key else {
            self.count(conn, |stats| stats.stale_messages += 1);
            if let Message::Ask { ticket, .. } | Message::Confirm { ticket } = message {
                let detail = "no such pin holds between these two incarnations".into();
                self.send(conn, &Message::NotHeld { ticket, detail });
            }
            return;
        };
        match message {
            Message::Ask { blocks, .. } => {
                let map = self.connections.get(&conn).and_then(|c| c.map.as_ref());
                let fits = map.is_some_and(|map| check_blocks(map, &blocks.0, pin.moved).is_ok());
                match self.pins.get_mut(&key).filter(|_| fits) {
                    Some(pin) => {
                        pin.remote = blocks.0;
                        self.owner_input(key, OwnerInput::Asked, now);
                    }
                    None => self.revoke(key, "the reader's blocks cannot be", now),
                }
            }
            Message::Confirm { .. } => {
                self.sum_late(key);
                self.owner_input(key, OwnerInput::Confirm, now);
            }
            _ => self.owner_input(key, OwnerInput::Unpin, now),
        }
    }

    /// Everything asked for is visible at the reader.
    pub(super) fn written(&mut self, key: u64, now: Instant) {
        self.sum_late(key);
        self.owner_input(key, OwnerInput::Written, now);
    }

    pub(super) fn pin_summed(&mut self, key: u64, run: SumRun, now: Instant) {
        self.owner_input(key, OwnerInput::Summed(run), now);
    }

    pub(super) fn revoke(&mut self, key: u64, detail: &str, now: Instant) {
        self.owner_input(key, OwnerInput::Revoked(detail.to_owned()), now);
    }

    pub(super) fn tick_pins(&mut self, now: Instant) {
        let pretended = self.config.hooks.pinning() == Pinning::Pretended;
        for key in self.pins.keys().copied().collect::<Vec<_>>() {
            if let Some(pin) = self.pins.get_mut(&key).filter(|pin| pretended && now >= pin.deadline) {
                pin.hold = None;
            }
            self.owner_input(key, OwnerInput::Tick, now);
        }
    }

    pub(super) fn pins_lost(&mut self, conn: ConnId, now: Instant) {
        let on: Vec<u64> = self.pins.iter().filter(|(_, pin)| pin.conn == conn).map(|(&key, _)| key).collect();
        on.into_iter().for_each(|key| self.owner_input(key, OwnerInput::ConnectionLost, now));
    }

    fn owner_input(&mut self, key: u64, input: OwnerInput, now: Instant) {
        let Some(pin) = self.pins.get_mut(&key) else { return };
        for action in pin.owner.handle(now, input) {
            self.owner_action(key, action);
        }
    }

    fn owner_action(&mut self, key: u64, action: OwnerAction) {
        let Some(pin) = self.pins.get(&key) else { return };
        let (conn, ticket, handoff) = (pin.conn, pin.owner.ticket, pin.handoff);
        match action {
            OwnerAction::SendGrant => {
                let blocks = GroupBlocks::clone(&pin.blocks);
                self.send(conn, &Message::Grant { handoff, ticket, blocks, from: 0 });
            }
            OwnerAction::SendRefuse { reason, detail } => self.send(conn, &Message::Refuse { handoff, reason, detail }),
            OwnerAction::Sum if self.config.hooks.pinning() == Pinning::Pretended => {}
            OwnerAction::Sum => self.sum(key),
            OwnerAction::Write => self.write_pinned(key),
            OwnerAction::LetGo => {
                if let Some(pin) = self.pins.get_mut(&key) {
                    pin.hold = None;
                }
            }
            OwnerAction::Flush => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.pump.cancel(key);
                    connection.pump.flush_posted(key, 0);
                }
            }
            OwnerAction::Disconnect => self.close(conn, "the reader takes none of the writes of a get that is over"),
            OwnerAction::SendHeld(runs) => {
                let sums = runs.iter().map(|run| run.sums.len() as u64).sum();
                for runs in messages_of(runs) {
                    self.send(conn, &Message::Checksums { ticket, runs });
                }
                self.send(conn, &Message::Held { ticket, algorithm: checksum::ALGORITHM, sums });
            }
            OwnerAction::SendNotHeld(detail) => self.send(conn, &Message::NotHeld { ticket, detail }),
            OwnerAction::Forget => self.unpin(key),
        }
    }

    /// Has the checksums of every layer computed. Of blocks that are let go meanwhile they are never sent, so they need no hold.
    fn sum(&self, key: u64) {
        let Some(pin) = self.pins.get(&key) else { return };
        let Some((cut, _)) = self.connections.get(&pin.conn).and_then(|c| c.cuts.as_ref()) else { return };
        for (group, shape) in self.config.map.layout().groups().iter().enumerate() {
            for layer in 0..shape.layers.len() {
                let (tokens, blocks, heads) = (0..pin.moved, pin.blocks.clone(), cut.source.clone());
                let hold = Arc::new(());
                self.checker.submit(Job::Sum { key, epoch: 0, group, layer, tokens, blocks, heads, hold });
            }
        }
    }

    /// The hazard itself: what is read is taken for what was pinned.
    fn sum_late(&self, key: u64) {
        if self.config.hooks.pinning() == Pinning::Pretended {
            self.sum(key);
        }
    }

    fn write_pinned(&mut self, key: u64) {
        let Some(pin) = self.pins.get(&key) else { return };
        let Some(connection) = self.connections.get_mut(&pin.conn) else { return };
        let (Some(theirs), Some((cut, _))) = (&connection.map, &connection.cuts) else { return };
        let (ours, put_max, ticket): (_, _, TicketId) =
            (&self.config.map, self.config.limits.put_bytes_max, pin.owner.ticket);
        let pump = &mut connection.pump;
        for (g, group) in ours.layout().groups().iter().enumerate() {
            let source = Side { map: ours, blocks: &pin.blocks.0[g], heads: &cut.source };
            let sink = Side { map: theirs, blocks: &pin.remote[g], heads: &cut.sink };
            for layer in 0..group.layers.len() {
                copies(source, sink, g, layer, 0..pin.moved, put_max, |run| pump.put(key, 0, ticket, run));
            }
        }
        pump.flush(key, 0);
    }

    fn unpin(&mut self, key: u64) {
        let Some(pin) = self.pins.remove(&key) else { return };
        self.inbox.offer_ended(key, &pin.request_id);
    }
}
