//! Two incarnations of one peer, each on its own connection, before this side knows that the earlier one has ended. Each test runs the same
//! events with a guard left out, which shows the hazard, and with the guard.

use super::*;
use crate::checksum::{self, layer_sums};
use crate::heads::{Cut, Heads};
use crate::message::{Commit, SumRun};
use crate::verify::work::Work;
use crate::{GetRequest, Hazard, Hazards, HeadShard, RefuseReason};
use baton_memory::HostPool;
use baton_types::TokenId;
use std::ops::Range;
use tokio::sync::oneshot;

const EARLIER: ConnId = CONN;
const NEXT: ConnId = ConnId(2);
/// Positions of every handoff here: one block.
const TOKENS: u32 = 16;

fn ours() -> Vec<TokenId> {
    (0..=TOKENS).map(|t| 100 + t).collect()
}
fn others() -> Vec<TokenId> {
    (0..=TOKENS).map(|t| 500 + 3 * t).collect()
}

/// The peer's earlier incarnation, or the later one.
fn start(conn: ConnId) -> Party {
    Party { incarnation: Incarnation(conn.0), ..party("peer") }
}

/// A worker with one claim, for the peer's later incarnation. The sequence reads from what the worker adopts.
#[derive(Default)]
struct Claiming {
    taken: Mutex<bool>,
    adopted: Mutex<Option<Vec<TokenId>>>,
}

impl SinkHandler for Claiming {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        if offer.source != start(NEXT) || std::mem::replace(&mut *self.taken.lock(), true) {
            return reply.refuse(RefuseReason::UnknownRequest, "no claim");
        }
        reply.grant(Box::new(Held(Notes::default(), blocks())));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        *self.adopted.lock() = Some(handoff.tokens);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
}

/// What the worker adopted.
#[derive(Debug, PartialEq, Eq)]
enum Adopted {
    Nothing,
    RightKv,
    WrongKv,
}

struct Scene {
    driver: Driver,
    notes: Notes,
    region: Arc<HostPool>,
    worker: Arc<Claiming>,
    now: Instant,
}

impl Scene {
    fn new(hazards: Hazards) -> Self {
        let region = HostPool::new(config("here").map.bytes()).unwrap();
        let ((mut driver, notes), worker) = (Driver::noting_over(region.clone()), Arc::<Claiming>::default());
        (driver.config.hazards, driver.calls) = (hazards, Box::new(Inline(worker.clone())));
        Self { driver, notes, region, worker, now: Instant::now() }
    }

    fn say(&mut self, conn: ConnId, message: &Message) {
        self.driver.event(Event::Message(conn, message.encode()), self.now);
        self.driver.commands(self.now);
        self.driver.windows_close(self.now);
        self.driver.commands(self.now);
    }

    /// An incarnation of the peer connects.
    fn greeted(&mut self, conn: ConnId) {
        self.driver.event(Event::Accepted { conn, proven: false }, self.now);
        self.say(conn, &Message::Hello(greeting_of(conn)));
    }

    /// Where the KV of a sequence is, and which bytes an incarnation of the peer computes there.
    fn places(&self, of: ConnId, tokens: &[TokenId]) -> Vec<(Range<usize>, u8)> {
        let (map, block) = (&self.driver.config.map, blocks().0[0].blocks[0]);
        let place = |position: u32, plane: usize| {
            let right = (tokens[position as usize] as usize * 7 + plane * 50 + of.0 as usize * 100) as u8;
            (map.token_range(0, 0, block, plane, position..position + 1), right)
        };
        (0..TOKENS).flat_map(|position| [place(position, 0), place(position, 1)]).collect()
    }

    fn store(&self, of: ConnId, tokens: &[TokenId]) {
        self.places(of, tokens).into_iter().for_each(|(range, byte)| {
            self.region.copy_in(range.start, &vec![byte; range.len()]);
        });
    }

    fn holds(&self, of: ConnId, tokens: &[TokenId]) -> bool {
        self.places(of, tokens).into_iter().all(|(range, byte)| {
            let mut bytes = vec![0; range.len()];
            self.region.copy_out(range.start, &mut bytes);
            bytes.iter().all(|found| *found == byte)
        })
    }

    fn heads(&self) -> Arc<Heads> {
        Cut::new(self.driver.config.map.layout(), HeadShard::WHOLE, HeadShard::WHOLE).unwrap().sink
    }

    /// Checksums of the bytes stored here.
    fn checksums(&self, ticket: TicketId) -> Message {
        let (map, blocks) = (&self.driver.config.map, &blocks().0[0]);
        let sums = layer_sums(&*self.region, map, blocks, &self.heads(), 0, 0, 0..TOKENS).unwrap();
        Message::Checksums { ticket, runs: vec![SumRun { group: 0, layer: 0, first_granule: 0, sums }] }
    }

    fn commit(&self, ticket: TicketId, tokens: Vec<TokenId>) -> Message {
        let bytes = (self.driver.config.map.layout().bytes_per_token() * TOKENS as usize) as u64;
        let (algorithm, sums, prompt_len, extra) = (checksum::ALGORITHM, 2, TOKENS, vec![]);
        Message::Commit(Box::new(Commit { ticket, algorithm, sums, bytes, prompt_len, tokens, extra }))
    }

    /// Offers a handoff in the name of the later incarnation. Returns its ticket, if granted.
    fn offer(&mut self, conn: ConnId) -> Option<TicketId> {
        let Message::Offer(mut offer) = offer(1, TOKENS) else { unreachable!() };
        offer.source = start(NEXT);
        self.say(conn, &Message::Offer(offer));
        let on = self.driver.table.keys_on(conn);
        on.into_iter().find_map(|key| match &self.driver.table.get(key)?.role {
            Role::Sink(sink) if sink.is_granted() => Some(sink.ticket()),
            _ => None,
        })
    }

    /// Waits until all received checksums are compared, and processes the results.
    fn compared(&mut self) {
        const MARK: HandoffKey = HandoffKey(u64::MAX); // Jobs are done in order, and this is the last.
        let (tokens, blocks, heads, runs) = (TOKENS, Arc::new(blocks()), self.heads(), Vec::new());
        let work = Work::Check { tokens, blocks, heads, runs, unseen: false };
        let inbox = self.driver.inbox.clone();
        let alive = Arc::new(());
        self.driver.verifier.submit(Job { inbox, key: MARK, life: Arc::downgrade(&alive), work });
        let until = Instant::now() + Duration::from_secs(30);
        let mut over = false;
        while !over {
            assert!(Instant::now() < until, "checksums are never compared");
            std::thread::sleep(Duration::from_millis(1));
            for command in self.driver.inbox.drain() {
                over |= matches!(command, Command::Input(MARK, _));
                self.driver.command(command, self.now);
            }
        }
    }

    /// What the worker adopted. Its claim is for KV of the later incarnation.
    fn adopted(&self) -> Adopted {
        match &*self.worker.adopted.lock() {
            None => Adopted::Nothing,
            Some(tokens) if self.holds(NEXT, tokens) => Adopted::RightKv,
            Some(_) => Adopted::WrongKv,
        }
    }
}

fn greeting_of(conn: ConnId) -> Box<Hello> {
    let mut hello = greeting();
    hello.party = start(conn);
    hello
}

/// A late commit of the earlier incarnation, for a ticket with the same number as the later incarnation's, whose KV has just arrived.
/// Returns what is adopted then, and what is adopted after the later incarnation's own commit.
fn commit_of_the_earlier(hazards: Hazards) -> [Adopted; 2] {
    let mut scene = Scene::new(hazards);
    [EARLIER, NEXT].into_iter().for_each(|conn| scene.greeted(conn));
    let ticket = scene.offer(NEXT).unwrap();
    scene.store(NEXT, &ours());
    let sums = scene.checksums(ticket);
    scene.say(NEXT, &sums);
    scene.compared();
    [(EARLIER, others()), (NEXT, ours())].map(|(conn, tokens)| {
        let commit = scene.commit(ticket, tokens);
        scene.say(conn, &commit);
        scene.adopted()
    })
}

#[test]
fn without_its_connection_a_commit_of_another_incarnation_names_other_tokens() {
    assert_eq!(commit_of_the_earlier([Hazard::TicketsOfAnyone].into()), [Adopted::WrongKv, Adopted::WrongKv]);
}

#[test]
fn a_commit_of_another_incarnation_adopts_nothing() {
    assert_eq!(commit_of_the_earlier(Hazards::default()), [Adopted::Nothing, Adopted::RightKv]);
}

/// The earlier incarnation offers what is claimed for the later one and writes its own KV; then the later one does.
fn offer_in_the_name_of_the_next(hazards: Hazards) -> Adopted {
    let mut scene = Scene::new(hazards);
    for conn in [EARLIER, NEXT] {
        scene.greeted(conn);
        if let Some(ticket) = scene.offer(conn) {
            scene.store(conn, &ours());
            let (sums, commit) = (scene.checksums(ticket), scene.commit(ticket, ours()));
            scene.say(conn, &sums);
            scene.say(conn, &commit);
            scene.compared();
        }
    }
    scene.adopted()
}

#[test]
fn without_names_that_are_its_own_a_start_fills_what_is_claimed_for_another() {
    assert_eq!(offer_in_the_name_of_the_next([Hazard::AnyIncarnation].into()), Adopted::WrongKv);
}

#[test]
fn an_offer_in_the_name_of_another_start_is_refused() {
    assert_eq!(offer_in_the_name_of_the_next(Hazards::default()), Adopted::RightKv);
}

/// What a reader adopts when its owner restarts between the pin and the reads. The new incarnation has another sequence in the same blocks,
/// and confirms its own pin over them, which has the same number.
fn owner_restarts(hazards: Hazards) -> Adopted {
    let mut scene = Scene::new(hazards);
    let (now, ticket) = (scene.now, TicketId(7));
    let (outcome, mut told) = oneshot::channel();
    let (request_id, deadline) = (RequestId::try_new("r").unwrap(), now + Duration::from_secs(60));
    let (blocks, name, hold) = (blocks(), b"s".to_vec(), Box::new(Held(scene.notes.clone(), blocks())));
    let request = GetRequest { request_id, name, from: 0, tokens: TOKENS, blocks: blocks.clone(), deadline, hold };
    let peer = Peer { party: start(EARLIER), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let key = scene.driver.inbox.get(peer, request, outcome).unwrap();
    scene.driver.commands(now);
    scene.say(EARLIER, &Message::Welcome(greeting_of(EARLIER)));
    scene.say(EARLIER, &Message::Grant { handoff: key.0, ticket, blocks, from: 0 });
    assert_eq!(*scene.notes.lock(), ["get"], "its planes are neighbours");

    scene.greeted(NEXT);
    scene.store(NEXT, &others());
    let bytes = scene.driver.config.map.layout().bytes_per_token() * TOKENS as usize;
    scene.driver.event(Event::Got(key.0, bytes), now);
    let sums = scene.checksums(ticket);
    scene.say(NEXT, &sums);
    scene.say(NEXT, &Message::Held { ticket, algorithm: checksum::ALGORITHM, sums: 2 });
    scene.compared();
    scene.driver.event(
        Event::Closed { conn: EARLIER, reason: "gone".into(), fenced: true, draining: false, unproven: false },
        now,
    );
    match told.try_recv().expect("the get is over") {
        Err(_) => Adopted::Nothing,
        Ok(_) if scene.holds(EARLIER, &ours()) => Adopted::RightKv,
        Ok(_) => Adopted::WrongKv,
    }
}

#[test]
fn without_its_connection_a_restarted_owner_confirms_what_it_never_pinned() {
    assert_eq!(owner_restarts([Hazard::TicketsOfAnyone].into()), Adopted::WrongKv);
}

#[test]
fn an_owner_that_restarted_confirms_nothing() {
    assert_eq!(owner_restarts(Hazards::default()), Adopted::Nothing);
}
