//! Offers of peers: which are served, and what begins with them.

use super::progress::Progress;
use super::receiving::Incoming;
use crate::handoff::sink::Expected;
use crate::handoff::{Admission, Exposure, Sink};
use crate::message::{Message, Offer};
use crate::transport::ConnId;
use crate::{GrantReply, Greetings, Party, RefuseReason, ReserveOffer, checksum};
use baton_types::{InstanceId, TicketId};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

impl Progress {
    /// A peer asks for room.
    pub(super) fn offered(&mut self, conn: ConnId, offer: Offer, now: Instant) {
        if let Err((reason, detail)) = self.check_offer(conn, &offer) {
            let handoff = offer.handoff;
            self.count_refusal(conn, reason);
            return self.send(conn, &Message::Refuse { handoff, reason, detail });
        }
        let left = Duration::from_millis(u64::from(offer.deadline_ms).min(self.config.limits.handoff_ms));
        let deadline = now + left;
        let layout = self.config.map.layout();
        let Some(connection) = self.connections.get(&conn) else { return };
        let (shard, legs, partial) = (connection.shard, connection.legs.0, connection.moves_parts());
        let token_bytes = connection.cuts.as_ref().map_or(0, |(_, cut)| cut.bytes(layout));
        let expected = Expected { tokens: offer.tokens, token_bytes, algorithm: checksum::ALGORITHM };
        let ticket = self.new_ticket();
        let mut sink = Sink::new(ticket, layout, expected, deadline, self.config.limits.abort());
        sink.take(self.config.hooks.commits());
        let key = self.inbox.offer(&offer.request_id);
        let question = ReserveOffer {
            request_id: offer.request_id.clone(),
            source: offer.source.clone(),
            tokens: offer.tokens,
            partial,
            deadline,
        };
        self.incoming_numbers.insert((conn, offer.handoff), key);
        self.incoming_tickets.insert(ticket, key);
        let incoming = Incoming::new(key, sink, offer, conn, now);
        let of = incoming.gathering_key();
        self.incoming.insert(key, incoming);
        if self.gather(key, of, shard, legs, now) {
            if let Some(incoming) = self.incoming.get_mut(&key) {
                incoming.unasked = Some(question);
            }
            self.ask_waiting(now);
        }
    }

    /// Asks the worker for room, as far as the bound on what each peer could leave in quarantine allows. A peer's offers go in order.
    pub(super) fn ask_waiting(&mut self, now: Instant) {
        let unasked: Vec<u64> =
            self.incoming.iter().filter(|(_, i)| i.unasked.is_some()).map(|(&key, _)| key).collect();
        let mut waiting = BTreeSet::new();
        for key in unasked {
            let Some(incoming) = self.incoming.get(&key) else { continue };
            let (peer, conn) = (incoming.offer.source.instance.clone(), incoming.conn());
            let (exposure, wanted) = (self.exposure(&peer, key), self.blocks_of(incoming));
            let max = self.config.limits.quarantined_blocks_of(&self.config.map);
            match exposure.admits(wanted, self.transport.closing_fences(conn), max) {
                Admission::Ask | Admission::Wait if waiting.contains(&peer) => {}
                Admission::Ask => {
                    if let Some(question) = self.incoming.get_mut(&key).and_then(|i| i.unasked.take()) {
                        self.handler.reserve(question, GrantReply::new(self.inbox.clone(), key));
                    }
                }
                Admission::Wait => {
                    waiting.insert(peer);
                }
                Admission::Refuse => {
                    let detail = match exposure.quarantined {
                        0 => format!(
                            "{wanted} blocks are more than {peer} may come to leave in quarantine, which is {max}"
                        ),
                        _ => barred(&peer, exposure),
                    };
                    self.refused(key, RefuseReason::Quarantine, detail, now);
                }
            }
        }
    }

    /// Why the worker's grant for an offer comes too late: blocks were quarantined for the peer since the worker was asked.
    pub(super) fn barred_since(&self, key: u64) -> Option<String> {
        let peer = &self.incoming.get(&key)?.offer.source.instance;
        let exposure = self.exposure(peer, key);
        (exposure.quarantined > 0).then(|| barred(peer, exposure))
    }

    /// Whether an offer from `theirs` to `ours` is the peer's own and for this incarnation, and can be served at all.
    pub(super) fn check_peer(&self, conn: ConnId, ours: &Party, theirs: &Party) -> Result<(), (RefuseReason, String)> {
        let connection = self.connections.get(&conn);
        if let Some(Err(failure)) = connection.and_then(|c| c.usable()) {
            return Err((RefuseReason::Incompatible, failure.to_string()));
        }
        if self.stopping.is_some() {
            return Err((RefuseReason::Draining, "the instance is going away".into()));
        }
        let any_start = self.config.hooks.greetings() == Greetings::AnyIncarnation;
        if *ours != self.config.party && !any_start {
            return Err((RefuseReason::WrongIncarnation, format!("this is {}, not {ours}", self.config.party)));
        }
        if connection.and_then(|c| c.party.as_ref()) != Some(theirs) && !any_start {
            return Err((RefuseReason::Protocol, "the offer is not the peer's own".into()));
        }
        Ok(())
    }

    fn check_offer(&self, conn: ConnId, offer: &Offer) -> Result<(), (RefuseReason, String)> {
        self.check_peer(conn, &offer.sink, &offer.source)?;
        let refuse = |reason, detail: String| Err((reason, detail));
        if self.incoming_numbers.contains_key(&(conn, offer.handoff)) {
            return refuse(RefuseReason::Protocol, "the offer is not its first".into());
        }
        if offer.from != 0 || !offer.name.is_empty() {
            return refuse(RefuseReason::Protocol, "what is left out of a put is for its sink to say".into());
        }
        let connection = self.connections.get(&conn);
        if connection.is_none_or(|c| c.cuts.is_none() || c.legs.0 != usize::from(offer.shards)) {
            return refuse(RefuseReason::Protocol, "the offer is not of the shards that hold heads of this one".into());
        }
        let blocks = self.config.map.layout().blocks_for(offer.tokens as usize);
        if offer.tokens == 0 || blocks > self.config.map.blocks() as usize {
            return refuse(RefuseReason::NoRoom, format!("{} tokens never fit this pool", offer.tokens));
        }
        if self.incoming_live() >= self.config.limits.incoming_max {
            return refuse(RefuseReason::Busy, format!("{} handoffs are open", self.incoming_live()));
        }
        Ok(())
    }

    pub(super) fn new_ticket(&self) -> TicketId {
        std::iter::repeat_with(|| TicketId(rand::random()))
            .find(|t| t.0 != 0 && !self.incoming_tickets.contains_key(t))
            .expect("64 random bits find a free ticket")
    }
}

fn barred(peer: &InstanceId, exposure: Exposure) -> String {
    format!(
        "{} blocks that {peer} could still write are quarantined; it gets no others until they are back",
        exposure.quarantined
    )
}
