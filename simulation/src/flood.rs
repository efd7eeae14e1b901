//! Floods: calm schedules in which one tenant asks for far more than there is, and another for less than its share. Nothing breaks in
//! them, so that how long the other one waits is for the order alone to say.

use crate::client::Ending;
use crate::executor::{Time, ms};
use crate::invariant::Invariant;
use crate::network::Lane;
use crate::race;
use crate::random::Random;
use crate::schedule::{Fault, HEALED, Penalties, Policy, Request, Schedule, Shape, WEIGHTS};
use crate::scheduled::Scheduled;
use baton_types::TokenId;
use std::time::Duration;

/// The flood begins, once routers know their workers.
pub(crate) const BEGINS: Time = ms(400);
/// Most that a step takes, with what delays the tasks around it.
pub(crate) const STEP_MAX: Time = ms(11);
/// Messages of one request that wait for each other, with what delays the tasks around them.
pub(crate) const MESSAGES_MAX: Time = ms(60);
/// An offer that waits is looked at again, its KV is put, verified and adopted.
pub(crate) const HANDOFF_MAX: Time = ms(150);

/// The tenants: who floods, and who stays below its share.
#[derive(Clone, Copy)]
struct Tenants {
    floods: usize,
    below: usize,
}

impl Tenants {
    /// The part of everything that the one below its share is due, as a numerator and its denominator.
    fn due(self) -> (u64, u64) {
        let (floods, below) = (WEIGHTS[self.floods], WEIGHTS[self.below]);
        (u64::from(below), u64::from(floods + below))
    }
}

/// A calm schedule with a flood.
pub fn draw(random: &mut Random, vocab: u32) -> Schedule {
    let mut shape = Shape::draw(random);
    (shape.routers, shape.prefills, shape.decodes) = (1, 1, 1);
    shape.blocks = random.of(&[16, 24]);
    // What waits for its blocks at the decode worker holds those of the prefill worker meanwhile.
    shape.prefill_blocks = 10 * shape.blocks;
    (shape.waiting_max, shape.admits, shape.slow_once_in) = (256, (256, 256), 0);
    shape.in_flight_bytes_max = 1 << 20;
    shape.handoff_max = Duration::from_secs(3);
    shape.attempts_max = 5;
    // Where nothing fences a peer, it is granted no more than its bound of quarantine, which large offers pass.
    shape.lane = random.of(&[Lane::Window, Lane::QueuePair]);
    let (floods, below) = random.of(&[(1, 2), (2, 1)]);
    let tenants = Tenants { floods, below };
    let requests = match random.below(8) {
        0 => places(&shape, tenants, vocab, random),
        1 => grants(&shape, tenants, vocab, random),
        2 => offers(&shape, tenants, vocab, random),
        3 => follows(&mut shape, vocab, random),
        4 | 5 => race::draw(&mut shape, vocab, random),
        _ => starves(&shape, tenants, vocab, random),
    };
    Schedule { shape, requests, faults: vec![(HEALED, Fault::Heal)] }
}

/// A request of so many tokens.
pub(crate) fn request(
    tenant: usize,
    policy: Policy,
    len: u64,
    max_tokens: u64,
    at: Time,
    vocab: u32,
    random: &mut Random,
) -> Request {
    let base = random.any() % 1_000_000;
    Request {
        prompt: (0..len).map(|i| ((base + i * 31) % u64::from(vocab)) as TokenId).collect(),
        max_tokens: max_tokens as u32,
        samples: 1,
        temperature: 1.0,
        penalties: Penalties::NONE,
        logprobs: None,
        ignore_eos: false,
        seed: random.any(),
        policy,
        priority: 0,
        tenant,
        at,
        deadline: at + ms(9_000),
        gone: None,
        pause: 0,
        to: 0,
        // What is claimed is bounded: some of a flood are refused.
        must_succeed: false,
        fair_within: None,
        is_in_race: false,
    }
}

/// The decode worker prefills and decodes everything: rows, places and blocks are what there is too little of.
fn places(shape: &Shape, tenants: Tenants, vocab: u32, random: &mut Random) -> Vec<Request> {
    let longest = u64::from(shape.blocks) * 4;
    let mut requests: Vec<Request> = (0..random.between(20, 40))
        .map(|_| {
            let (len, max_tokens) = (random.between(1, longest), random.between(8, 14));
            let at = BEGINS + random.below(ms(30));
            request(tenants.floods, Policy::Local, len, max_tokens, at, vocab, random)
        })
        .collect();
    let tokens_max = below_share(shape, tenants);
    for n in 0..3 {
        let max_tokens = random.between(1, 6);
        let len = random.between(1, tokens_max - max_tokens);
        let at = BEGINS + ms(60) + n * ms(500) + random.below(ms(50));
        let fair = request(tenants.below, Policy::Local, len, max_tokens, at, vocab, random);
        let within = MESSAGES_MAX + (1 + service(shape, tenants, len) + max_tokens) * STEP_MAX;
        requests.push(Request { fair_within: Some(within), ..fair });
    }
    requests
}

/// The decode worker is full of what it prefilled itself. KV of the other tenant is offered to it.
fn grants(shape: &Shape, tenants: Tenants, vocab: u32, random: &mut Random) -> Vec<Request> {
    let mut requests = places(shape, tenants, vocab, random);
    for request in requests.iter_mut().filter(|request| request.fair_within.is_some()) {
        request.policy = Policy::Remote;
        let prefills = request.prompt.len() as u64 / shape.chunk_tokens as u64 + 1;
        let decodes = u64::from(request.max_tokens);
        request.fair_within = Some(MESSAGES_MAX + HANDOFF_MAX + (1 + prefills + decodes) * STEP_MAX);
    }
    requests
}

/// KV of the flood is offered to the decode worker all the time, and fills its claims. So is KV of the other tenant.
fn offers(shape: &Shape, tenants: Tenants, vocab: u32, random: &mut Random) -> Vec<Request> {
    // The other tenant was served just before, so that its next turn is later than those of much that waits. It comes first all the same.
    let mut requests = vec![request(tenants.below, Policy::Remote, 150, 1, BEGINS, vocab, random)];
    let begins = BEGINS + ms(300);
    requests.extend((0..random.between(100, 140)).map(|n| {
        let (len, max_tokens) = (random.between(1, 30), random.between(30, 40));
        let at = begins + n * ms(5) + random.below(ms(20));
        request(tenants.floods, Policy::Remote, len, max_tokens, at, vocab, random)
    }));
    let tokens_max = below_share(shape, tenants).min(30);
    for n in 0..3 {
        let max_tokens = random.between(2, 6);
        let len = random.between(1, tokens_max - max_tokens);
        let at = begins + ms(300) + n * ms(500) + random.below(ms(50));
        let fair = request(tenants.below, Policy::Remote, len, max_tokens, at, vocab, random);
        // Blocks that a transfer of the flood writes are not taken from it: the second handoff.
        let within = MESSAGES_MAX + 2 * HANDOFF_MAX + (1 + service(shape, tenants, len) + max_tokens) * STEP_MAX;
        requests.push(Request { fair_within: Some(within), ..fair });
    }
    requests
}

/// Small offers come all the time, each of which finds room. One comes that needs most of the pool.
fn starves(shape: &Shape, tenants: Tenants, vocab: u32, random: &mut Random) -> Vec<Request> {
    let (small, answer) = (30, 14);
    // The other tenant may have been served before. That has moved virtual time, and counts no more.
    let turns = if random.once_in(2) { 5 * u64::from(WEIGHTS[tenants.below]) } else { 0 };
    let served = (0..=turns).map(|n| {
        let len = if n < turns { 60 } else { 1 };
        request(tenants.below, Policy::Remote, len, 1, BEGINS + n * ms(20), vocab, random)
    });
    let mut requests: Vec<Request> = served.collect();
    let begins = BEGINS + ms(200) + turns * ms(30);
    requests.extend((0..random.between(160, 200)).map(|n| {
        let (len, at) = (random.between(1, small), begins + n * ms(8) + random.below(ms(20)));
        request(tenants.floods, Policy::Remote, len, answer, at, vocab, random)
    }));
    let len = random.between(u64::from(shape.blocks) * 10, u64::from(shape.blocks) * 12);
    let at = begins + ms(150) + random.below(ms(50));
    let fair = request(tenants.below, Policy::Remote, len, 2, at, vocab, random);
    // What is before it in the order ends: handoffs that are under way, and their answers.
    let before = 2 * HANDOFF_MAX + answer * STEP_MAX;
    let prefills = service(shape, tenants, len);
    let within = MESSAGES_MAX + HANDOFF_MAX + before + (1 + prefills + 2) * STEP_MAX;
    requests.push(Request { fair_within: Some(within), ..fair });
    requests
}

/// No flood: an offer waits for KV that is on its way to another and that it begins with too, and follows as soon as that is there.
fn follows(shape: &mut Shape, vocab: u32, random: &mut Random) -> Vec<Request> {
    (shape.caches, shape.chunk_tokens, shape.running_max) = (true, 32, 6);
    let (len, answer) = (128, 4);
    let first = request(1, Policy::Remote, len, answer, BEGINS, vocab, random);
    let mut second = request(1, Policy::Remote, len, answer, BEGINS + ms(2) + random.below(ms(5)), vocab, random);
    second.prompt[..96].copy_from_slice(&first.prompt[..96]);
    let steps = 2 * (len / shape.prefill_rows() + 1) + answer;
    vec![first, Request { fair_within: Some(MESSAGES_MAX + HANDOFF_MAX + steps * STEP_MAX), ..second }]
}

/// Most tokens of a sequence that fits into the share of the one below it.
fn below_share(shape: &Shape, tenants: Tenants) -> u64 {
    let (weight, weights) = tenants.due();
    let size = u64::from(shape.decode_block_tokens);
    let blocks = u64::from(shape.blocks) * 16 / size - u64::from(shape.watermark_blocks);
    (blocks * weight / weights).max(1) * size
}

/// Steps in which a prompt is computed from the part of each chunk that its tenant is due, rounded up.
fn service(shape: &Shape, tenants: Tenants, len: u64) -> u64 {
    let (weight, weights) = tenants.due();
    let rows = shape.prefill_rows();
    (len * weights).div_ceil(rows * weight) + 1
}

/// Who is below its share has its answer in time, whatever the others ask for.
pub(crate) fn check(cluster: &Scheduled) {
    for (number, (request, end)) in cluster.schedule().requests.iter().zip(cluster.ends.all()).enumerate() {
        let Some(within) = request.fair_within else { continue };
        let whole_at = end.as_ref().filter(|(_, end)| *end == Ending::Whole).map(|(at, _)| at - request.at);
        cluster.counts.lock().add("flood: requests below their share", 1);
        if whole_at.is_none_or(|took| took > within) {
            let what = format!("request {number} is due in {within} us, it ended after {whole_at:?}: {end:?}");
            cluster.breaches.add(Invariant::FairShare, what);
        }
    }
}
