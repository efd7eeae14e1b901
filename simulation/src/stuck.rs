//! Schedules around blocks that a peer may still write: one prefill worker, whose handoffs end in quarantine or wait for its bound, and
//! little else. They leave time for what random schedules rarely meet.

use crate::executor::ms;
use crate::flood::{BEGINS, HANDOFF_MAX, MESSAGES_MAX, STEP_MAX, request};
use crate::network::Lane;
use crate::random::Random;
use crate::schedule::{Fault, HEALED, Policy, Request, Schedule, Shape};
use std::time::Duration;

/// The prefill worker's slot, after the router's.
const PREFILL: usize = 1;
/// A peer has so long to let go of a handoff that was given up.
const ABORT_MAX: u64 = 30;
/// Tokens of the pool, in blocks of 16.
const POOL: u64 = 256;

pub(crate) fn draw(random: &mut Random, vocab: u32) -> Schedule {
    let mut shape = Shape::draw(random);
    (shape.routers, shape.prefills, shape.decodes) = (1, 1, 1);
    (shape.blocks, shape.prefill_blocks, shape.decode_block_tokens) = (16, 64, 16);
    (shape.waiting_max, shape.admits, shape.slow_once_in) = (64, (32, 8), 0);
    (shape.chunk_tokens, shape.running_max) = (32, 6);
    // Writes wait for their credit.
    (shape.put_bytes_max, shape.in_flight_bytes_max) = (128, 512);
    (shape.handoff_max, shape.abort_max) = (Duration::from_millis(1_500), Duration::from_millis(ABORT_MAX));
    shape.attempts_max = 5;
    let (requests, mut faults) = match random.below(3) {
        0 => barred(&mut shape, vocab, random),
        1 => silent(&mut shape, vocab, random),
        _ => bounded(&mut shape, vocab, random),
    };
    faults.push((HEALED, Fault::Heal));
    Schedule { shape, requests, faults }
}

type Drawn = (Vec<Request>, Vec<(u64, Fault)>);

/// A prefill worker stands still and does not let go of a put that was given up. Meanwhile there is room for its next offer.
fn barred(shape: &mut Shape, vocab: u32, random: &mut Random) -> Drawn {
    shape.lane = Lane::SharedMemory;
    let first = BEGINS + ms(30) + random.below(ms(20));
    let room = request(0, Policy::Local, POOL * 9 / 16, 60, BEGINS, vocab, random);
    let given_up = request(1, Policy::Remote, 64, 8, first, vocab, random);
    let next = request(1, Policy::Remote, 64, 8, first + ms(2), vocab, random);
    let stalls = first + ms(15) + random.below(ms(25));
    let gone = Some(stalls + random.below(ms(20)));
    let faults = vec![(stalls, Fault::Stall { slot: PREFILL }), (stalls + ms(400), Fault::Resume { slot: PREFILL })];
    (vec![room, Request { gone, ..given_up }, next], faults)
}

/// A prefill worker stands still and does not let go of a put that was given up. Closing the connection fences it, so that its blocks are of
/// use before the worker counts as gone.
fn silent(shape: &mut Shape, vocab: u32, random: &mut Random) -> Drawn {
    shape.lane = random.of(&[Lane::Window, Lane::QueuePair]);
    let given_up = request(1, Policy::Remote, 144, 8, BEGINS, vocab, random);
    let stalls = BEGINS + ms(15) + random.below(ms(30));
    let gone = Some(stalls + random.below(ms(10)));
    let (len, answer) = (POOL - 16, 2);
    let needs_all = request(0, Policy::Local, len, answer, stalls + ms(10), vocab, random);
    let steps = 1 + len / shape.prefill_rows() + answer;
    let within = Some(MESSAGES_MAX + ms(ABORT_MAX) + steps * STEP_MAX);
    let faults = vec![(stalls, Fault::Stall { slot: PREFILL }), (stalls + ms(1_000), Fault::Resume { slot: PREFILL })];
    (vec![Request { gone, ..given_up }, Request { fair_within: within, ..needs_all }], faults)
}

/// Offers of which no two fit into the bound of what their source may leave in quarantine: each is admitted once the one before has ended.
fn bounded(shape: &mut Shape, vocab: u32, random: &mut Random) -> Drawn {
    (shape.lane, shape.is_calm) = (Lane::SharedMemory, true);
    let (count, len, answer) = (4, 80, 2);
    let steps = count * (1 + len / shape.prefill_rows() + answer);
    let within = Some(MESSAGES_MAX + count * HANDOFF_MAX + steps * STEP_MAX);
    let mut offer = |_| {
        let offer = request(1, Policy::Remote, len, answer, BEGINS + random.below(ms(5)), vocab, random);
        Request { fair_within: within, ..offer }
    };
    ((0..count).map(&mut offer).collect(), Vec::new())
}
