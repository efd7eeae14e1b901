//! Detours: schedules in which one worker or one link is in trouble, and others are not. A patient request has a way all the time, and
//! has to succeed. And crowds at decode workers, whose requests may move once from one to the other.

use crate::executor::{Time, ms};
use crate::network::Lane;
use crate::random::Random;
use crate::schedule::{self, FIRST, Fault, HEALED, PATIENCE, Policy, RETRIES, Request, Schedule, Shape, WELL};
use baton_types::TokenId;
use std::time::Duration;

/// Faults of a worker come until then.
const FAULTS: Time = ms(1_200);

/// A schedule with a way around its fault.
pub fn draw(random: &mut Random, vocab: u32) -> Schedule {
    let mut shape = Shape::draw(random);
    shape.lane = random.of(&[Lane::Window, Lane::QueuePair]);
    (shape.slow_once_in, shape.in_flight_bytes_max, shape.is_calm) = (0, 1 << 20, false);
    shape.attempts_max = 5;
    shape.retries = RETRIES;
    match random.below(4) {
        way @ 0..=1 => {
            // Mostly one decode worker: only the other prefill worker is left. One attempt may find the other decode worker full, and one
            // the link in trouble.
            (shape.prefills, shape.decodes) = (2, random.of(&[1, 1, 2]));
            shape.attempts_max = shape.decodes as u32 + 1;
            // Queues with room: where that worker's is full, the link in trouble is tried again.
            (shape.handoff_max, shape.waiting_max) = (Duration::from_millis(900), 64);
            let (slot, other) = (shape.routers, shape.routers + shape.prefills);
            let is_down = Fault::Part { slot, other, silent: random.once_in(2) };
            let fault = if way == 0 { is_down } else { Fault::Spoil { slot, other } };
            with_a_way(shape, vec![(ms(1), fault)], vocab, random)
        }
        2 => {
            (shape.prefills, shape.decodes) = (2, 2);
            let faults = of_one_worker(&shape, random);
            with_a_way(shape, faults, vocab, random)
        }
        _ => crowds(shape, vocab, random),
    }
}

fn with_a_way(shape: Shape, mut faults: Vec<(Time, Fault)>, vocab: u32, random: &mut Random) -> Schedule {
    let mut requests = schedule::requests(&shape, vocab, random);
    for request in &mut requests {
        request.must_succeed |= request.waits() && shape.moves(request);
    }
    faults.push((HEALED, Fault::Heal));
    Schedule { shape, requests, faults }
}

/// One worker dies, stands still, drains, or has a device that fails.
fn of_one_worker(shape: &Shape, random: &mut Random) -> Vec<(Time, Fault)> {
    let slot = random.between(shape.routers as u64, shape.slots() as u64 - 1) as usize;
    let at = FIRST + random.below(FAULTS - FIRST);
    let later = at + ms(1) + random.below(ms(400));
    match random.below(5) {
        0 => vec![(at, Fault::Crash { slot, silent: random.once_in(2) })],
        1 => vec![(at, Fault::Crash { slot, silent: random.once_in(2) }), (later, Fault::Restart { slot })],
        2 => vec![(at, Fault::Stall { slot }), (later + ms(random.of(&[5, 300, 1_000])), Fault::Resume { slot })],
        3 => vec![(at, Fault::Drain { slot })],
        _ => vec![(at, Fault::DeviceFails { slot })],
    }
}

/// Both decode workers run a long answer, of which one ends first. Both routers have requests that wait for room, and hear of it at about
/// the same time.
fn crowds(mut shape: Shape, vocab: u32, random: &mut Random) -> Schedule {
    (shape.routers, shape.prefills, shape.decodes) = (2, 1, 2);
    (shape.blocks, shape.decode_block_tokens) = (32, 16);
    shape.prefill_blocks = 10 * shape.blocks;
    (shape.running_max, shape.waiting_max, shape.admits) = (6, 64, (64, 8));
    shape.handoff_max = Duration::from_secs(4);
    let at = FIRST + random.below(ms(100));
    let mut requests = Vec::new();
    for max_tokens in [random.between(250, 270), random.between(100, 160)] {
        let one = long(&shape, at, random.between(220, 235), max_tokens, vocab, random);
        requests.push(Request { to: 0, ..one });
    }
    let burst = at + ms(100) + random.below(ms(50));
    for to in 0..random.between(2, 4) as usize {
        let (len, max_tokens) = (random.between(295, 310), random.between(100, 190));
        let next = long(&shape, burst + random.below(ms(3)), len, max_tokens, vocab, random);
        requests.push(Request { to: to % 2, ..next });
    }
    requests.extend((0..2).map(|_| schedule::late(&shape, vocab, WELL, random)));
    Schedule { shape, requests, faults: vec![(HEALED, Fault::Heal)] }
}

/// A request of so many tokens, whose KV is put.
fn long(shape: &Shape, at: Time, len: u64, max_tokens: u64, vocab: u32, random: &mut Random) -> Request {
    Request {
        prompt: (0..len).map(|_| random.below(u64::from(vocab)) as TokenId).collect(),
        max_tokens: max_tokens as u32,
        ignore_eos: true,
        samples: 1,
        policy: Policy::Remote,
        priority: 0,
        at,
        deadline: at + ms(PATIENCE),
        gone: None,
        pause: 0,
        must_succeed: true,
        ..schedule::request(shape, vocab, random)
    }
}
