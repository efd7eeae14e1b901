//! What a seed decides before anything happens: the cluster, its bounds, the requests and the faults.

use super::clock::{Time, ms};
use super::event::Fault;
use super::flow::policy;
use super::model::{Oracle, VOCAB};
use super::random::Random;
use super::wire::Lane;
use super::world::Request;
use baton_router::PrefillPolicy;
use baton_router::pure::RetryLimits;
use baton_types::TokenId;
use std::time::Duration;

/// Requests come until then, faults a little longer.
const ARRIVALS: Time = ms(1200);
/// The first comes when routers may know their workers.
const FIRST: Time = ms(260);
/// From here on nothing breaks, and everybody runs.
pub(super) const HEALED: Time = ms(1800);
/// Long enough after that for views, leases and probations: whoever comes now is served.
const WELL: Time = HEALED + ms(1600);
/// Routers, workers and etcd stop talking of themselves.
pub(super) const TALK_ENDS: Time = WELL + ms(1900);
/// A request that came before repairs or later ends within this after both, whatever its deadline: five attempts may each wait for the
/// longest handoff, and clients that have time for more than that have nine seconds.
pub(super) const ENDS_WITHIN: Time = ms(5000);
/// Patience of clients, in milliseconds, whose deadlines are no help to a request that is stuck.
const PATIENCE: usize = 9_000;
/// Everything must be quiet ten seconds after the last request ended.
pub(super) const END: Time = TALK_ENDS + ms(10_000);

/// Cluster and bounds of one schedule.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) routers: usize,
    pub(super) prefills: usize,
    pub(super) decodes: usize,
    /// Blocks of 16 tokens in the pool of a decode worker.
    pub(super) blocks: u32,
    /// And of a prefill worker.
    pub(super) prefill_blocks: u32,
    pub(super) decode_block_tokens: u32,
    pub(super) lane: Lane,
    /// Routers keep the leases themselves, without etcd.
    pub(super) is_embedded: bool,
    pub(super) watermark: usize,
    pub(super) running_max: usize,
    pub(super) chunk_tokens: usize,
    pub(super) epoch_bytes: u64,
    pub(super) put_bytes_max: usize,
    pub(super) handoff_max: Time,
    pub(super) abort_wait: Duration,
    pub(super) tick: Time,
    pub(super) stall: Duration,
    pub(super) recheck: Duration,
    pub(super) retry: RetryLimits,
    /// Requests that a router serves at once, and that wait for their turn.
    pub(super) admits: (usize, usize),
    /// Messages take a few milliseconds, and this often up to two hundred.
    pub(super) slow_once_in: usize,
}

impl Shape {
    pub(super) fn draw(random: &mut Random) -> Self {
        let blocks = random.of(&[8, 10, 16, 24]);
        Self {
            routers: random.between(1, 2),
            prefills: random.between(1, 2),
            decodes: random.between(1, 2),
            blocks,
            prefill_blocks: blocks * random.of(&[1, 1, 2]),
            decode_block_tokens: random.of(&[16, 16, 32]),
            lane: random.of(&Lane::ALL),
            is_embedded: random.once_in(4),
            watermark: random.between(0, 2),
            running_max: random.between(2, 6),
            chunk_tokens: random.of(&[8, 24, 64]),
            epoch_bytes: random.of(&[256, 1024, 8192]),
            put_bytes_max: random.of(&[128, 512, 4096]),
            handoff_max: ms(random.between(120, 900) as u64),
            abort_wait: Duration::from_millis(random.between(20, 120) as u64),
            tick: ms(random.of(&[10, 25, 50])),
            stall: Duration::from_millis(400),
            recheck: Duration::from_millis(40),
            retry: RetryLimits {
                attempts_max: random.between(3, 5) as u32,
                backoff_min: Duration::from_millis(10),
                backoff_max: Duration::from_millis(150),
                place_max: Duration::from_millis(400),
                ready_max: Duration::from_millis(random.of(&[0, 100])),
                adopted_max: Duration::from_millis(500),
            },
            admits: (random.of(&[3, 8, 32]), random.of(&[2, 8])),
            slow_once_in: random.of(&[8, 25, 200]),
        }
    }

    /// Name of a process: routers come first, then prefill workers, then decode workers.
    pub(super) fn name(&self, process: usize) -> String {
        match process.checked_sub(self.routers) {
            None => format!("router{process}"),
            Some(w) if w < self.prefills => format!("p{w}"),
            Some(w) => format!("d{}", w - self.prefills),
        }
    }

    /// Most blocks that one source may leave in quarantine: a quarter of the pool, as the transfer has it.
    pub(super) fn quarantined_max(&self) -> usize {
        (self.blocks * 16 / self.decode_block_tokens / 4).max(1) as usize
    }

    pub(super) fn processes(&self) -> usize {
        self.routers + self.prefills + self.decodes
    }
}

/// The requests, with the right answer of each.
pub(super) fn requests(shape: &Shape, random: &mut Random) -> Vec<Request> {
    let mut requests: Vec<Request> = (0..random.between(9, 16)).map(|_| request(shape, random)).collect();
    if random.once_in(4) {
        crowd(shape, &mut requests, random);
    }
    requests.extend((0..2).map(|_| late(shape, random)));
    requests
}

/// Makes some of the requests long, of which no two fit a decode worker's pool, and come at once.
fn crowd(shape: &Shape, requests: &mut [Request], random: &mut Random) {
    let at = FIRST + random.below((ARRIVALS - FIRST) as usize) as Time;
    for request in requests.iter_mut().take(5) {
        let len = random.between(shape.blocks as usize * 9, shape.blocks as usize * 13);
        request.prompt = (0..len).map(|i| (i * 31 % VOCAB as usize) as TokenId).collect();
        request.answer = Oracle::of(&request.prompt).answer(request.max_tokens);
        request.policy = PrefillPolicy::Remote;
        request.deadline += at.saturating_sub(request.at);
        (request.at, request.gone) = (at + random.below(ms(60) as usize) as Time, None);
    }
}

/// A small request after all repairs, by a patient client: it must succeed.
fn late(shape: &Shape, random: &mut Random) -> Request {
    let mut late = request(shape, random);
    late.prompt.truncate(32);
    late.answer = Oracle::of(&late.prompt).answer(late.max_tokens);
    late.at = WELL + random.below(ms(300) as usize) as Time;
    (late.deadline, late.gone, late.must_succeed) = (late.at + ms(PATIENCE as u64), None, true);
    late.policy = PrefillPolicy::Auto;
    late
}

fn request(shape: &Shape, random: &mut Random) -> Request {
    let longest = if random.once_in(12) { shape.blocks as usize * 16 + 20 } else { shape.blocks as usize * 8 };
    let len = random.between(1, longest.min(150));
    // Some share their beginnings, so that a block of another request looks almost right.
    let base = random.below(3) * 1000;
    let token = |i: usize, random: &mut Random| match random.once_in(9) {
        true => random.below(VOCAB as usize) as TokenId,
        false => ((base + i * 31) % VOCAB as usize) as TokenId,
    };
    let prompt: Vec<TokenId> = (0..len).map(|i| token(i, random)).collect();
    let max_tokens = random.between(1, 14);
    let at = FIRST + random.below((ARRIVALS - FIRST) as usize) as Time;
    let patience = match random.below(6) {
        0 => random.between(30, 300),
        1 | 2 => PATIENCE,
        _ => random.between(800, 2400),
    };
    Request {
        answer: Oracle::of(&prompt).answer(max_tokens),
        prompt,
        max_tokens,
        policy: policy(random.below(8)),
        priority: random.of(&[0, 0, 0, 1]),
        at,
        deadline: at + ms(patience as u64),
        gone: random.once_in(6).then(|| at + random.below(ms(400) as usize) as Time),
        to: random.below(shape.routers),
        router: None,
        last_token: None,
        must_succeed: false,
        outcome: None,
    }
}

/// The faults, with the end of each.
pub(super) fn faults(shape: &Shape, requests: usize, random: &mut Random) -> Vec<(Time, Fault)> {
    let mut faults = Vec::new();
    for _ in 0..random.of(&[0, 1, 2, 3, 4, 6, 8]) {
        let at = random.below((HEALED - ms(200)) as usize) as Time;
        let process = random.below(shape.processes());
        let worker = random.between(shape.routers, shape.processes() - 1);
        let soon = random.of(&[3, 3, 40, 400]);
        let later = at + ms(1) + random.below(ms(soon) as usize) as Time;
        match random.below(22) {
            0..=5 => {
                let process = if random.once_in(5) { process } else { worker };
                faults.push((at, Fault::Crash { process, silent: random.once_in(3) }));
                faults.push((later, Fault::Restart { process }));
            }
            6..=10 => {
                let process = if random.once_in(5) { process } else { worker };
                faults.push((at, Fault::Stall { process }));
                faults.push((later + ms(random.of(&[5, 300, 1000])), Fault::Resume { process }));
            }
            11 | 12 => {
                let other = random.between(shape.routers, shape.processes() - 1);
                faults.push((at, Fault::Cut { process: worker, other }));
            }
            13 => faults.push((at, Fault::BreakWatch { process: random.below(shape.routers) })),
            14 => faults.push((at, Fault::Wipe { all: random.once_in(2) })),
            15 => faults.push((at, Fault::EtcdAway { ms: random.between(50, 900) as u64 })),
            16 => faults.push((at, Fault::LoseRecords)),
            17 => faults.push((at, Fault::Damage { process: worker })),
            // One, or all: a request that breaks two workers is given up.
            18 if random.once_in(2) => faults.push((at, Fault::DeviceFails { process: worker })),
            18 => {
                let all = shape.routers..shape.processes();
                faults.extend(all.map(|process| (at, Fault::DeviceFails { process })));
            }
            _ => faults.push((at, Fault::Pause { request: random.below(requests) })),
        }
    }
    faults.push((HEALED, Fault::Heal));
    faults
}
