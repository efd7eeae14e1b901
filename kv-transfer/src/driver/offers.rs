//! Handles offers of peers: which are accepted, and when the bound on quarantined blocks allows asking the worker.

use super::Driver;
use super::connections::Connection;
use super::effects::link;
use super::places::{NoPlace, Used};
use super::quarantine_bound::{Admission, QuarantineLoad};
use super::table::Role;
use crate::greeting::Terms;
use crate::hazards::hazard;
use crate::message::{Direction, Message, Offer};
use crate::plan::{blocks_filled, check_from};
use crate::role::{Counted, HandoffKey, Input};
use crate::transport::ConnId;
use crate::{CommitPayload, Party, RefuseReason, get, put};
use baton_types::{InstanceId, TicketId, seeded};
use std::time::Instant;

impl Driver {
    /// A peer wants to put or to get something.
    pub(super) fn offered(&mut self, conn: ConnId, offer: Offer, now: Instant) {
        let (handoff, direction) = (offer.handoff, offer.direction);
        let check = match direction {
            Direction::Put => self.check_put(conn, &offer),
            Direction::Get => self.check_get(conn, &offer),
        };
        if let Err((reason, detail)) = check {
            if direction == Direction::Put {
                self.tally.counted(self.connections.party(conn), Counted::Refused(reason));
            }
            return self.send(conn, &Message::Refuse { handoff, reason, detail });
        }
        let key = self.inbox.offer(&offer.request_id);
        let draw = std::iter::repeat_with(|| TicketId((self.draw)()));
        let ticket = draw.into_iter().find(|t| t.0 != 0 && !self.table.has_given(*t));
        let ticket = ticket.expect("64 random bits find a free ticket");
        let mut effects = Vec::new();
        let proven = self.connections.get(conn).is_some_and(|c| c.proven);
        let link = link(&self.config, &*self.transport, &self.connections, conn, key);
        let role = match direction {
            Direction::Put => Role::Sink(Box::new(put::Sink::new(offer, ticket, &link, now))),
            Direction::Get => Role::Owner(get::Owner::new(offer, ticket, proven, &link, now, &mut effects)),
        };
        self.table.insert(key, conn, role);
        effects.into_iter().for_each(|effect| self.perform(key, conn, effect, now));
        self.admit_waiting(now);
    }

    /// Checks that an offer from `theirs` to `ours` is the peer's own, is the first with its number, and names this incarnation.
    fn check_offer(
        &self,
        conn: ConnId,
        offer: &Offer,
        ours: &Party,
        theirs: &Party,
    ) -> Result<&Terms, (RefuseReason, String)> {
        let terms = self.connections.get(conn).and_then(Connection::terms);
        let terms = terms.ok_or((RefuseReason::Protocol, "an offer before the greeting".to_owned()))?;
        terms.check().map_err(|failure| (RefuseReason::Incompatible, failure.to_string()))?;
        if self.stopping.is_some() {
            return Err((RefuseReason::Draining, "the instance is going away".into()));
        }
        let any_start = hazard!(self.config, AnyIncarnation) || seeded!(OtherIncarnation);
        if *ours != self.config.party && !any_start {
            return Err((RefuseReason::WrongIncarnation, format!("this is {}, not {ours}", self.config.party)));
        }
        if terms.party != *theirs && !any_start {
            return Err((RefuseReason::Protocol, "the offer is not the peer's own".into()));
        }
        if self.table.has_number(conn, offer.handoff) {
            return Err((RefuseReason::Protocol, "the offer is not its first".into()));
        }
        Ok(terms)
    }

    fn check_put(&self, conn: ConnId, offer: &Offer) -> Result<(), (RefuseReason, String)> {
        let terms = self.check_offer(conn, offer, &offer.sink, &offer.source)?;
        let refuse = |reason, detail: String| Err((reason, detail));
        if offer.from != 0 || !offer.name.is_empty() {
            return refuse(RefuseReason::Protocol, "what is left out of a put is for its sink to say".into());
        }
        if terms.inward.is_none() || terms.legs_here != offer.shards {
            return refuse(RefuseReason::Protocol, "the offer is not of the shards that hold heads of this one".into());
        }
        if offer.shards > 1 && !self.calls.joins_legs() {
            return refuse(RefuseReason::Protocol, "sequences of several shards are not taken here".into());
        }
        let map = &self.config.map;
        let needed = blocks_filled(map.layout(), 0, offer.tokens).into_iter().zip(map.group_blocks());
        // A pool of windows alone has room for any length; no commit carries more tokens than this.
        let is_endless = offer.tokens as usize > CommitPayload::TOKENS_MAX;
        if offer.tokens == 0 || is_endless || needed.into_iter().any(|(needed, blocks)| needed > *blocks as usize) {
            return refuse(RefuseReason::NoRoom, format!("{} tokens never fit this pool", offer.tokens));
        }
        let peer = &terms.party.instance;
        let puts = Used::of(self.table.sources().chain(self.draining.sources()), peer);
        self.check_place(peer, puts, NoPlace::Puts, NoPlace::ItsPuts)
    }

    fn check_get(&self, conn: ConnId, offer: &Offer) -> Result<(), (RefuseReason, String)> {
        let terms = self.check_offer(conn, offer, &offer.source, &offer.sink)?;
        let refuse = |reason, detail: String| Err((reason, detail));
        if terms.shard != self.config.shard.index() || (terms.legs_here, terms.legs_there) != (1, 1) {
            return refuse(RefuseReason::Protocol, "gets between shards that hold other heads are not served".into());
        }
        if offer.shards != 1 || offer.tokens == 0 {
            return refuse(RefuseReason::Protocol, "a get of nothing that is served".into());
        }
        let here = check_from(&self.config.map, offer.from, offer.tokens);
        here.and_then(|()| terms.check_part(offer.from, offer.tokens - offer.from))
            .map_err(|detail| (RefuseReason::Protocol, detail))?;
        let peer = &terms.party.instance;
        let gets = Used::of(self.table.readers(), peer);
        self.check_place(peer, gets, NoPlace::Gets, NoPlace::ItsGets)
    }

    /// Checks that there is a place for one more handoff of the peer, and for its calls.
    fn check_place(
        &self,
        peer: &InstanceId,
        open: Used,
        all_open: fn(usize) -> NoPlace,
        its_open: fn(usize) -> NoPlace,
    ) -> Result<(), (RefuseReason, String)> {
        let max = self.config.limits.accepted_handoffs_max;
        let calls = Used { in_all: self.waiting_calls.total(), by_peer: self.waiting_calls.of(peer) };
        let has_place = open.check(max, all_open, its_open);
        has_place
            .and_then(|()| calls.check(max.saturating_mul(2), NoPlace::Calls, NoPlace::ItsCalls))
            .map_err(|no_place| (NoPlace::REASON, no_place.to_string()))
    }

    /// Lets sinks ask the worker for blocks, as far as the bound on quarantined blocks of each peer allows. A peer's offers are admitted in
    /// order.
    pub(super) fn admit_waiting(&mut self, now: Instant) {
        let mut passed_over: Vec<InstanceId> = Vec::new();
        for key in self.table.keys_where(|role| matches!(role, Role::Sink(sink) if sink.waits())) {
            let Some(entry) = self.table.get(key) else { continue };
            let Role::Sink(sink) = &entry.role else { continue };
            let (peer, wanted) = sink.at_stake(self.config.map.layout());
            let (peer, conn) = (peer.clone(), entry.conn);
            let (admission, quarantine_load, max) = self.admits(&peer, key, conn, wanted);
            match admission {
                Admission::Ask | Admission::Wait if passed_over.contains(&peer) => {}
                Admission::Ask => self.input(key, Input::Admitted, now),
                Admission::Wait => passed_over.push(peer),
                Admission::Refuse => {
                    let detail = match quarantine_load.quarantined {
                        0 => format!(
                            "{wanted} blocks are more than {peer} may come to leave in quarantine, which is {max}"
                        ),
                        _ => barred(&peer, quarantine_load),
                    };
                    self.input(key, Input::Barred(detail), now);
                }
            }
        }
    }

    /// Whether a peer may write to `wanted` blocks, given what else it could leave in quarantine and the bound on that.
    pub(super) fn admits(
        &self,
        peer: &InstanceId,
        key: HandoffKey,
        conn: ConnId,
        wanted: usize,
    ) -> (Admission, QuarantineLoad, usize) {
        let max = self.config.limits.quarantined_blocks_of(&self.config.map);
        let quarantine_load = self.quarantine_load(peer, key);
        (quarantine_load.admits(wanted, self.transport.closing_fences(conn), max), quarantine_load, max)
    }

    pub(super) fn quarantine_load(&self, peer: &InstanceId, except: HandoffKey) -> QuarantineLoad {
        let fences = |conn| self.transport.closing_fences(conn);
        let mut quarantine_load = self.table.quarantine_load(peer, except, self.config.map.layout(), fences);
        quarantine_load.quarantined += self.draining.quarantined(peer);
        quarantine_load
    }

    /// Why a grant of the worker is too late: blocks of the peer were quarantined after the worker was asked.
    pub(super) fn barred_since(&self, key: HandoffKey) -> Option<String> {
        let Role::Sink(sink) = &self.table.get(key)?.role else { return None };
        let peer = &sink.source().instance;
        let quarantine_load = self.quarantine_load(peer, key);
        (quarantine_load.quarantined > 0 && !seeded!(GrantDespiteQuarantine)).then(|| barred(peer, quarantine_load))
    }
}

fn barred(peer: &InstanceId, quarantine_load: QuarantineLoad) -> String {
    format!(
        "{} blocks that {peer} could still write are quarantined; it gets no others until they are back",
        quarantine_load.quarantined
    )
}
