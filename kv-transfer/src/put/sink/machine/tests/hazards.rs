//! The hazards of a commit. Each test runs the same events with a guard left out, which shows the hazard, and with the guard. Hazards of a
//! peer's other incarnations are tested with the service.
//!
//! A minimal shell surrounds the real state machine, plans and checksums: one pool, whose correct bytes are known for every token. Blocks
//! belong to another sequence as soon as the state machine releases them, and not before. A guard is left out by a hook, or by a shell that
//! misuses the state machine.

use super::{Expected, Sink, SinkAction, SinkInput};
use crate::checksum::{self, layer_sums};
use crate::heads::{Cut, Heads};
use crate::message::{Commit, SumRun};
use crate::{HandoffFailure, Hazard, Hazards, HeadShard};
use baton_memory::HostPool;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout, KvPoolMap, TicketId, TokenId};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Positions of every handoff here: two blocks.
const TOKENS: u32 = 32;
const BLOCKS: [BlockId; 2] = [BlockId(2), BlockId(0)];
const TICKET: TicketId = TicketId(9);
const DEADLINE: Duration = Duration::from_secs(1);

/// The sequence whose KV is handed off, and another sequence.
fn ours() -> Vec<TokenId> {
    (0..=TOKENS).map(|t| 100 + t).collect()
}
fn others() -> Vec<TokenId> {
    (0..=TOKENS).map(|t| 500 + 3 * t).collect()
}

/// A pool whose KV is a function of the token.
struct Pool {
    map: KvPoolMap,
    region: Arc<HostPool>,
    heads: Arc<Heads>,
}

impl Pool {
    fn new() -> Self {
        let layout = KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
        let heads = Cut::new(&layout, HeadShard::WHOLE, HeadShard::WHOLE).unwrap().sink;
        let map = KvPoolMap::try_new(layout, 4).unwrap();
        let region = HostPool::new(map.bytes()).unwrap();
        Self { map, region, heads }
    }

    /// Where the KV of a position is, and its correct bytes.
    fn places(&self, tokens: &[TokenId], positions: Range<u32>) -> Vec<(Range<usize>, u8)> {
        let mut places = Vec::new();
        for position in positions {
            let (block, at) = (BLOCKS[position as usize / 16], position % 16);
            for (layer, plane) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let right = (tokens[position as usize] as usize * 7 + layer * 2 + plane) as u8;
                places.push((self.map.token_range(0, layer, block, plane, at..at + 1), right));
            }
        }
        places
    }

    /// Performs a source's writes.
    fn store(&self, tokens: &[TokenId], positions: Range<u32>) {
        for (range, right) in self.places(tokens, positions) {
            self.region.copy_in(range.start, &vec![right; range.len()]);
        }
    }

    /// Whether the blocks hold the KV of this sequence.
    fn holds(&self, tokens: &[TokenId]) -> bool {
        self.places(tokens, 0..TOKENS).into_iter().all(|(range, right)| {
            let mut bytes = vec![0; range.len()];
            self.region.copy_out(range.start, &mut bytes);
            bytes.iter().all(|byte| *byte == right)
        })
    }

    /// Checksums of the bytes stored here.
    fn sums(&self, positions: Range<u32>) -> Vec<SumRun> {
        let first_granule = positions.start / checksum::GRANULE;
        let run = |layer: usize| {
            let table = BlockTable::from_start(BLOCKS.to_vec());
            let sums = layer_sums(&*self.region, &self.map, &table, &self.heads, 0, layer, positions.clone()).unwrap();
            SumRun { group: 0, layer: layer as u16, first_granule, sums }
        };
        vec![run(0), run(1)]
    }

    fn bytes(&self, tokens: u32) -> u64 {
        (self.map.layout().bytes_per_token() * tokens as usize) as u64
    }

    fn expected(&self, tokens: u32) -> Expected {
        Expected { tokens, token_bytes: self.bytes(1), algorithm: checksum::ALGORITHM }
    }

    /// The commit of a handoff over this many positions.
    fn commit(&self, tokens: Vec<TokenId>, positions: u32) -> SinkInput {
        let (algorithm, sums, bytes) = (checksum::ALGORITHM, u64::from(positions / 16) * 4, self.bytes(positions));
        let (ticket, prompt_len, extra) = (TICKET, TOKENS, vec![]);
        SinkInput::Commit(Box::new(Commit { ticket, algorithm, sums, bytes, prompt_len, tokens, extra }))
    }
}

/// One reservation, granted.
struct Reservation {
    sink: Sink,
    begin: Instant,
    /// The blocks are held here, not by a worker or the pool.
    holds: bool,
    /// Reports every checksum as correct.
    trusts: bool,
    /// The requested actions, as text.
    asked: Vec<String>,
}

impl Reservation {
    fn new(pool: &Pool, expected: Expected) -> Self {
        let begin = Instant::now();
        let sink = Sink::new(TICKET, pool.map.layout(), expected, begin + DEADLINE, Duration::from_millis(100));
        let mut new = Self { sink, begin, holds: true, trusts: false, asked: Vec::new() };
        assert!(new.hear(pool, 0, SinkInput::Granted { from: 0 }).is_none());
        new
    }

    /// Feeds an input at a number of milliseconds, and carries out the actions. Returns what is delivered to the worker.
    fn hear(&mut self, pool: &Pool, at_ms: u64, input: SinkInput) -> Option<Commit> {
        let (now, mut inputs, mut delivered) =
            (self.begin + Duration::from_millis(at_ms), VecDeque::from([input]), None);
        while let Some(input) = inputs.pop_front() {
            for action in self.sink.handle(now, input) {
                self.asked.push(format!("{action:?}").split([' ', '(']).next().unwrap_or_default().to_owned());
                match action {
                    SinkAction::Verify(runs) => inputs.push_back(self.verified(pool, &runs)),
                    SinkAction::CloseWindow => inputs.push_back(SinkInput::WindowClosed),
                    SinkAction::Deliver(commit) => (delivered, self.holds) = (Some(*commit), false),
                    // The next sequence is stored there at once.
                    SinkAction::Release | SinkAction::ReleaseQuarantined if std::mem::take(&mut self.holds) => {
                        pool.store(&others(), 0..TOKENS);
                    }
                    _ => {}
                }
            }
        }
        delivered
    }

    fn verified(&self, pool: &Pool, runs: &[SumRun]) -> SinkInput {
        let mut sums = 0;
        for run in runs {
            let (start, granules) = (run.first_granule * 16, run.sums.len() as u32 / 2);
            let found = pool.sums(start..start + granules * 16);
            if !self.trusts && found[usize::from(run.layer)].sums != run.sums {
                return SinkInput::Unverified(HandoffFailure::Corrupt("checksum differs".into()));
            }
            sums += run.sums.len() as u64;
        }
        SinkInput::Verified { sums }
    }

    fn asked_to(&self, what: &str) -> bool {
        self.asked.iter().any(|action| action == what)
    }
}

/// What the worker adopted.
#[derive(Debug, PartialEq, Eq)]
enum Adopted {
    Nothing,
    RightKv,
    WrongKv,
}

fn adopted(pool: &Pool, delivered: Option<Commit>) -> Adopted {
    match delivered {
        None => Adopted::Nothing,
        Some(commit) if pool.holds(&commit.tokens) => Adopted::RightKv,
        Some(_) => Adopted::WrongKv,
    }
}

#[test]
fn an_undisturbed_handoff_is_adopted() {
    let pool = Pool::new();
    let mut reservation = Reservation::new(&pool, pool.expected(TOKENS));
    pool.store(&ours(), 0..TOKENS);
    assert!(reservation.hear(&pool, 1, SinkInput::Checksums(pool.sums(0..TOKENS))).is_none());
    let delivered = reservation.hear(&pool, 2, pool.commit(ours(), TOKENS));
    assert_eq!(adopted(&pool, delivered), Adopted::RightKv);
}

/// The result of a commit whose ticket has already ended, for each way in which a ticket ends.
fn late(hazards: Hazards) -> [Adopted; 4] {
    let deadline = DEADLINE.as_millis() as u64;
    let cancel = || SinkInput::Cancel(HandoffFailure::Aborted("the client went away".into()));
    let flushed = || SinkInput::Aborted { flushed: true, detail: "told to".into() };
    let ends = [
        vec![(deadline, SinkInput::Tick), (deadline + 10, flushed())],
        vec![(500, cancel()), (510, flushed())],
        vec![(500, cancel()), (600, SinkInput::Tick), (610, SinkInput::Fenced)],
        vec![], // Its deadline has passed, but there was no tick yet.
    ];
    ends.map(|end| {
        let pool = Pool::new();
        let mut reservation = Reservation::new(&pool, pool.expected(TOKENS));
        reservation.sink.leave_out(&hazards);
        pool.store(&ours(), 0..TOKENS);
        reservation.hear(&pool, 1, SinkInput::Checksums(pool.sums(0..TOKENS)));
        let comes = end.last().map_or(deadline, |(at, _)| at + 10);
        for (at, input) in end {
            assert!(reservation.hear(&pool, at, input).is_none());
        }
        let delivered = reservation.hear(&pool, comes, pool.commit(ours(), TOKENS));
        adopted(&pool, delivered)
    })
}

#[test]
fn without_its_end_a_ticket_adopts_blocks_of_others() {
    use Adopted::{RightKv, WrongKv};
    // The last one still has its blocks; its caller has given it up.
    assert_eq!(late([Hazard::LateCommits].into()), [WrongKv, WrongKv, WrongKv, RightKv]);
}

#[test]
fn a_ticket_that_is_over_adopts_nothing() {
    assert_eq!(late(Hazards::default()), [const { Adopted::Nothing }; 4]);
}

/// How often blocks are released when a commit comes twice, the second time before the worker has answered.
fn doubled(hazards: Hazards) -> usize {
    let pool = Pool::new();
    let mut reservation = Reservation::new(&pool, pool.expected(TOKENS));
    reservation.sink.leave_out(&hazards);
    pool.store(&ours(), 0..TOKENS);
    reservation.hear(&pool, 1, SinkInput::Checksums(pool.sums(0..TOKENS)));
    let twice = [2, 3].map(|at| reservation.hear(&pool, at, pool.commit(ours(), TOKENS)));
    twice.iter().flatten().count()
}

#[test]
fn without_memory_a_doubled_commit_gives_blocks_to_two_owners() {
    assert_eq!(doubled([Hazard::DoubledCommits].into()), 2);
}

#[test]
fn a_doubled_commit_gives_blocks_once() {
    assert_eq!(doubled(Hazards::default()), 1);
}

/// A commit of half of what was reserved. A sink that takes the size from the commit adopts the other half with its old bytes.
fn out_of_range(offer_counts: bool) -> Adopted {
    let pool = Pool::new();
    pool.store(&others(), 0..TOKENS);
    let expected = pool.expected(if offer_counts { TOKENS } else { TOKENS / 2 });
    let mut reservation = Reservation::new(&pool, expected);
    pool.store(&ours(), 0..TOKENS / 2);
    reservation.hear(&pool, 1, SinkInput::Checksums(pool.sums(0..TOKENS / 2)));
    let delivered = reservation.hear(&pool, 2, pool.commit(ours(), TOKENS / 2));
    assert_eq!(reservation.asked_to("SendNack"), offer_counts);
    adopted(&pool, delivered)
}

#[test]
fn without_the_size_of_the_offer_half_a_handoff_is_adopted() {
    assert_eq!(out_of_range(false), Adopted::WrongKv);
}

#[test]
fn a_commit_of_less_than_was_reserved_adopts_nothing() {
    assert_eq!(out_of_range(true), Adopted::Nothing);
}

/// A byte is damaged in transit.
fn damaged(compares: bool) -> Adopted {
    let pool = Pool::new();
    let mut reservation = Reservation::new(&pool, pool.expected(TOKENS));
    reservation.trusts = !compares;
    pool.store(&ours(), 0..TOKENS);
    let sums = pool.sums(0..TOKENS);
    let (range, right) = pool.places(&ours(), 20..21).remove(0);
    pool.region.copy_in(range.start, &[right ^ 1]);
    reservation.hear(&pool, 1, SinkInput::Checksums(sums));
    let delivered = reservation.hear(&pool, 2, pool.commit(ours(), TOKENS));
    adopted(&pool, delivered)
}

#[test]
fn without_checksums_a_damaged_byte_is_adopted() {
    assert_eq!(damaged(false), Adopted::WrongKv);
}

#[test]
fn a_damaged_byte_is_never_adopted() {
    assert_eq!(damaged(true), Adopted::Nothing);
}
