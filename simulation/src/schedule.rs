//! What a seed decides before anything happens: the cluster, its bounds, the requests and the faults.

use crate::detours;
use crate::executor::{Time, ms};
use crate::flood;
use crate::network::Lane;
use crate::random::Random;
use crate::stuck;
use baton_types::TokenId;
use std::time::Duration;

/// Requests come until then, faults a little longer.
const ARRIVALS: Time = ms(1_200);
/// The first comes when routers may know their workers.
pub(crate) const FIRST: Time = ms(260);
/// From here on nothing breaks, and everybody runs.
pub const HEALED: Time = ms(1_800);
/// Long enough after that for views, leases, probations and attempts to connect: whoever comes now is served.
pub const WELL: Time = HEALED + ms(1_600);
/// A request that came before repairs or later ends within this after both, whatever its deadline: five attempts may each wait for the
/// longest handoff, and clients that have time for more than that have nine seconds.
pub const ENDS_WITHIN: Time = ms(5_000);
/// Patience of clients, in milliseconds, whose deadlines are no help to a request that is stuck.
pub(crate) const PATIENCE: u64 = 9_000;
/// No deadline of those that came before [`HEALED`] is later.
const ALONE: Time = HEALED + ms(PATIENCE);
/// Everything must be quiet then.
pub const END: Time = ALONE + ms(300) + ms(PATIENCE) + ms(3_000);

/// Pins of at most so long expire while something is got under them.
const EXPIRES_EARLY: Duration = Duration::from_millis(100);
/// Prefixes that are got and evicted at once.
const EVICTORS: usize = 3;

/// One schedule in so many is calm.
const CALM_ONCE_IN: u64 = 8;
/// And one of the others in so many is about quarantine.
const STUCK_ONCE_IN: u64 = 40;

/// A budget of retries that is never spent.
pub const RETRIES: (u32, f64) = (1024, 50.0);

/// Tenants by number, with their weights.
pub const WEIGHTS: [u32; 3] = [1, 1, 4];

/// Cluster and bounds of one schedule.
#[derive(Clone, Debug)]
pub struct Shape {
    pub routers: usize,
    pub prefills: usize,
    pub decodes: usize,
    /// Blocks in the pool of a decode worker.
    pub blocks: u32,
    /// And of a prefill worker.
    pub prefill_blocks: u32,
    pub decode_block_tokens: u32,
    /// States in the pool of each worker; 0: the model has none.
    pub states: u32,
    pub lane: Lane,
    /// Routers let prefill workers get prefixes that decode workers have cached.
    pub gets: bool,
    /// Prefill workers get them one-sided, where the lane lets them.
    pub one_sided_gets: bool,
    /// Routers keep the leases themselves, without etcd.
    pub is_embedded: bool,
    pub watermark_blocks: u32,
    pub running_max: usize,
    /// Sequences that wait at an engine, and claims of a decode worker.
    pub waiting_max: usize,
    /// Workers keep prefixes.
    pub caches: bool,
    /// Longest time for which blocks are pinned for a peer that gets them.
    pub pin_max: Duration,
    pub chunk_tokens: usize,
    pub epoch_bytes: u64,
    pub put_bytes_max: usize,
    /// With little, writes wait at their source, and a handoff that is given up has some left.
    pub in_flight_bytes_max: usize,
    pub handoff_max: Duration,
    pub abort_max: Duration,
    pub stall_max: Duration,
    pub attempts_max: u32,
    pub ready_max: Duration,
    /// Retries that a router has at most at once, and more per second.
    pub retries: (u32, f64),
    /// Requests that a router serves at once, and that wait for their turn.
    pub admits: (usize, usize),
    /// Events of an answer that wait for a client that does not read.
    pub client_events: usize,
    /// Messages take a few milliseconds, and once in so many times up to two hundred; 0 is never.
    pub slow_once_in: u64,
    /// Nothing breaks: what fails then has its reason in what was asked.
    pub is_calm: bool,
}

impl Shape {
    /// Rows of prefill beside decode rows.
    pub(crate) fn mixed_chunk_tokens(&self) -> usize {
        self.chunk_tokens / 2
    }

    /// Rows that prompts have in every step.
    pub(crate) fn prefill_rows(&self) -> u64 {
        (self.chunk_tokens - self.running_max).min(self.mixed_chunk_tokens()) as u64
    }

    pub(crate) fn draw(random: &mut Random) -> Self {
        let blocks = random.of(&[8, 10, 16, 24]);
        let is_calm = random.once_in(CALM_ONCE_IN);
        Self {
            routers: random.between(1, 2) as usize,
            prefills: random.between(1, 2) as usize,
            decodes: random.between(1, 2) as usize,
            blocks,
            prefill_blocks: blocks * random.of(&[1, 1, 2]),
            decode_block_tokens: random.of(&[16, 16, 32]),
            states: 0,
            lane: random.of(&Lane::ALL),
            gets: random.once_in(2),
            one_sided_gets: random.once_in(2),
            is_embedded: random.once_in(4),
            watermark_blocks: random.between(0, 2) as u32,
            running_max: random.between(2, 6) as usize,
            waiting_max: random.of(&[4, 16, 64]),
            caches: !random.once_in(8),
            pin_max: Duration::from_millis(random.of(&[5, 30, 200, 2_000])),
            chunk_tokens: random.of(&[16, 32, 64]),
            epoch_bytes: random.of(&[256, 1024, 8192]),
            put_bytes_max: random.of(&[128, 512, 4096]),
            in_flight_bytes_max: if is_calm { 1 << 20 } else { random.of(&[512, 2048, 1 << 20]) },
            handoff_max: Duration::from_millis(random.between(120, 900)),
            abort_max: Duration::from_millis(random.between(20, 120)),
            stall_max: Duration::from_millis(400),
            attempts_max: random.between(3, 5) as u32,
            ready_max: Duration::from_millis(random.of(&[0, 100])),
            retries: if is_calm { RETRIES } else { random.of(&[RETRIES, RETRIES, (8, 5.0)]) },
            admits: (random.of(&[3, 8, 32]), random.of(&[2, 8])),
            client_events: random.of(&[64, 64, 2]),
            slow_once_in: if is_calm { 0 } else { random.of(&[8, 25, 200]) },
            is_calm,
        }
    }

    /// Name of a slot: routers come first, then prefill workers, then decode workers.
    pub fn name(&self, slot: usize) -> String {
        match slot.checked_sub(self.routers) {
            None => format!("router{slot}"),
            Some(w) if w < self.prefills => format!("p{w}"),
            Some(w) => format!("d{}", w - self.prefills),
        }
    }

    /// Most blocks of a pool with so many in its full group that a peer may come to leave in quarantine, on lanes that nothing fences.
    pub fn quarantined_max(&self, blocks: u32) -> usize {
        // A state comes beside the blocks of a sequence.
        (blocks / 2).max(1) as usize + usize::from(self.states > 0)
    }

    /// Whether the KV of a request may be put where its policy says: what nothing fences has a bound.
    pub(crate) fn moves(&self, request: &Request) -> bool {
        let blocks = self.blocks * 16 / self.decode_block_tokens;
        let moved = (request.prompt.len() as u32).div_ceil(self.decode_block_tokens) as usize;
        request.policy != Policy::Remote || self.lane.closing_fences() || moved <= self.quarantined_max(blocks)
    }

    /// Whether a slot is a decode worker's.
    pub fn is_decode(&self, slot: usize) -> bool {
        slot >= self.routers + self.prefills
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.routers + self.prefills + self.decodes
    }
}

/// Where a request is prefilled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Auto,
    Remote,
    Local,
}

/// What sampling takes off the likelihood of tokens that came before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    pub presence: f32,
    pub frequency: f32,
    /// Of the prompt's tokens too.
    pub repetition: f32,
}

impl Penalties {
    pub const NONE: Self = Self { presence: 0.0, frequency: 0.0, repetition: 1.0 };

    fn draw(random: &mut Random) -> Self {
        let presence = random.of(&[0.0, 0.6, 2.0, -1.0]);
        Self { presence, frequency: random.of(&[0.0, 0.7]), repetition: random.of(&[1.0, 1.4, 0.7]) }
    }
}

/// What one client asks.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<TokenId>,
    pub max_tokens: u32,
    pub samples: u32,
    /// 0 takes the likeliest token, 1 draws.
    pub temperature: f32,
    pub penalties: Penalties,
    /// Its answer comes with log-probabilities, and with those of so many other tokens.
    pub logprobs: Option<u32>,
    /// Its answer goes on behind the model's end tokens.
    pub ignore_eos: bool,
    pub seed: u64,
    pub policy: Policy,
    pub priority: i32,
    /// Of [`WEIGHTS`].
    pub tenant: usize,
    pub at: Time,
    pub deadline: Time,
    /// When its client goes.
    pub gone: Option<Time>,
    /// It takes nothing for so long after its first tokens.
    pub pause: Time,
    /// The router that it asks.
    pub to: usize,
    /// Nothing is broken while it runs, and its client waits.
    pub must_succeed: bool,
    /// Its tenant is below its share, and is due the whole answer after this time.
    pub fair_within: Option<Time>,
    /// It is one of those that are served by weight, since all of them wait at once.
    pub is_in_race: bool,
}

impl Request {
    /// Whether its client waits for all of its answer.
    pub(crate) fn waits(&self) -> bool {
        self.deadline - self.at >= ms(PATIENCE) && self.gone.is_none() && self.pause == 0
    }

    /// It comes then, by a client as patient as before.
    pub(crate) fn come_at(&mut self, at: Time) {
        (self.deadline, self.gone) = (at + self.deadline - self.at, self.gone.map(|gone| at + gone - self.at));
        self.at = at;
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Crash {
        slot: usize,
        silent: bool,
    },
    Restart {
        slot: usize,
    },
    Stall {
        slot: usize,
    },
    Resume {
        slot: usize,
    },
    /// All data links between two workers break.
    Cut {
        slot: usize,
        other: usize,
    },
    /// No data link passes between two workers; where `silent`, who dials hears nothing of that.
    Part {
        slot: usize,
        other: usize,
        silent: bool,
    },
    /// All writes of one worker to another arrive damaged.
    Spoil {
        slot: usize,
        other: usize,
    },
    /// The next write of a worker arrives damaged.
    Damage {
        slot: usize,
    },
    DeviceFails {
        slot: usize,
    },
    /// An operator drains a worker, which is restarted later.
    Drain {
        slot: usize,
    },
    BreakWatch {
        router: usize,
    },
    EtcdAway {
        ms: u64,
    },
    EtcdWiped {
        all: bool,
    },
    EtcdLosesRecords,
    /// Everything is repaired.
    Heal,
}

/// Everything that a seed decides beforehand.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub shape: Shape,
    pub requests: Vec<Request>,
    pub faults: Vec<(Time, Fault)>,
}

impl Schedule {
    /// The schedule of a seed; `vocab` tokens are known.
    pub fn draw(random: &mut Random, vocab: u32) -> Self {
        if random.once_in(8) {
            return flood::draw(random, vocab);
        }
        if random.once_in(STUCK_ONCE_IN) {
            return stuck::draw(random, vocab);
        }
        if random.once_in(8) {
            return detours::draw(random, vocab);
        }
        let shape = Shape::draw(random);
        let requests = requests(&shape, vocab, random);
        let faults = if shape.is_calm { vec![(HEALED, Fault::Heal)] } else { faults(&shape, random) };
        Self { shape, requests, faults }
    }
}

pub(crate) fn requests(shape: &Shape, vocab: u32, random: &mut Random) -> Vec<Request> {
    let mut requests: Vec<Request> = (0..random.between(9, 16)).map(|_| request(shape, vocab, random)).collect();
    if random.once_in(4) {
        crowd(shape, vocab, &mut requests, random);
    }
    if shape.gets {
        turns(shape, vocab, &mut requests, random);
        if shape.pin_max < EXPIRES_EARLY {
            evictors(shape, vocab, &mut requests, random);
        }
    }
    for request in &mut requests {
        request.must_succeed = shape.is_calm && request.waits() && shape.moves(request);
    }
    requests.extend((0..2).map(|_| late(shape, vocab, WELL, random)));
    // Where nothing fences, whatever does not fit beside the quarantine stays in queues to its deadline, and may fill them.
    if shape.lane == Lane::SharedMemory {
        requests.push(late(shape, vocab, ALONE, random));
    }
    requests
}

/// Makes some of the requests long, of which no two fit a decode worker's pool, and come at once.
fn crowd(shape: &Shape, vocab: u32, requests: &mut [Request], random: &mut Random) {
    let at = FIRST + random.below(ARRIVALS - FIRST);
    for (n, request) in requests.iter_mut().take(5).enumerate() {
        let len = random.between(u64::from(shape.blocks) * 9, u64::from(shape.blocks) * 13);
        request.prompt = (0..len).map(|i| ((i * 31 + n as u64 * 7) % u64::from(vocab)) as TokenId).collect();
        (request.policy, request.samples) = (Policy::Remote, 1);
        request.come_at(at + random.below(ms(60)));
        request.gone = None;
    }
}

/// Makes pairs of the last requests: one is prefilled where it decodes, and another goes on with its prompt on a prefill worker, which has
/// to get that from there or to compute it.
fn turns(shape: &Shape, vocab: u32, requests: &mut [Request], random: &mut Random) {
    let longest = u64::from(shape.blocks.min(shape.prefill_blocks)) * 16;
    for pair in requests.rchunks_exact_mut(2).take(3) {
        let [first, next] = pair else { continue };
        let len = random.between(longest / 4, longest / 2);
        first.prompt = (0..len).map(|_| random.below(u64::from(vocab)) as TokenId).collect();
        let more = random.between(1, longest / 4);
        next.prompt = first.prompt.clone();
        next.prompt.extend((0..more).map(|_| random.below(u64::from(vocab)) as TokenId));
        (first.policy, next.policy, next.tenant) = (Policy::Local, Policy::Remote, first.tenant);
        next.come_at(first.at + ms(40) + random.below(ms(400)));
        (first.samples, next.samples) = (1, 1);
    }
}

/// Makes the first requests long ones that are prefilled where they decode: each comes while one of the last gets a prefix there, and makes
/// room of that once the pin expires.
fn evictors(shape: &Shape, vocab: u32, requests: &mut [Request], random: &mut Random) {
    let count = requests.len();
    for n in 0..EVICTORS.min(count.saturating_sub(2 * EVICTORS)) {
        let at = requests[count - 1 - 2 * n].at + random.below(ms(20));
        let evictor = &mut requests[n];
        let len = random.between(u64::from(shape.blocks) * 9, u64::from(shape.blocks) * 14);
        evictor.prompt = (0..len).map(|_| random.below(u64::from(vocab)) as TokenId).collect();
        (evictor.policy, evictor.samples, evictor.gone) = (Policy::Local, 1, None);
        evictor.come_at(at);
    }
}

/// A small request after all repairs, by a patient client: it must succeed.
pub(crate) fn late(shape: &Shape, vocab: u32, from: Time, random: &mut Random) -> Request {
    let mut late = request(shape, vocab, random);
    late.prompt.truncate(32);
    late.at = from + random.below(ms(300));
    (late.deadline, late.gone, late.pause, late.must_succeed) = (late.at + ms(PATIENCE), None, 0, true);
    (late.policy, late.samples) = (Policy::Auto, 1);
    late
}

pub(crate) fn request(shape: &Shape, vocab: u32, random: &mut Random) -> Request {
    let pool = u64::from(shape.blocks);
    let longest = if random.once_in(12) { pool * 16 + 20 } else { pool * 8 };
    let len = random.between(1, longest.min(150));
    // Some share their beginnings, so that caches hit, and a block of another request looks almost right.
    let base = random.below(3) * 1000;
    let shared = if random.once_in(3) { random.between(1, len) } else { 0 };
    let mut prompt: Vec<TokenId> = Vec::with_capacity(len as usize);
    for i in 0..len {
        let is_odd = i >= shared && random.once_in(9);
        prompt
            .push(if is_odd { random.below(u64::from(vocab)) } else { (base + i * 31) % u64::from(vocab) } as TokenId);
    }
    let at = FIRST + random.below(ARRIVALS - FIRST);
    let patience = match random.below(6) {
        0 => random.between(30, 300),
        1 | 2 => PATIENCE,
        _ => random.between(800, 2_400),
    };
    Request {
        prompt,
        max_tokens: random.between(1, 14) as u32,
        samples: random.of(&[1, 1, 1, 1, 2, 3]),
        temperature: random.of(&[0.0, 1.0]),
        penalties: if random.once_in(2) { Penalties::draw(random) } else { Penalties::NONE },
        logprobs: random.of(&[None, None, None, Some(2)]),
        ignore_eos: random.once_in(8),
        seed: random.any(),
        policy: random.of(&[Policy::Auto, Policy::Auto, Policy::Auto, Policy::Remote, Policy::Remote, Policy::Local]),
        priority: random.of(&[0, 0, 0, 1]),
        tenant: random.below(WEIGHTS.len() as u64) as usize,
        at,
        deadline: at + ms(patience),
        gone: random.once_in(6).then(|| at + random.below(ms(400))),
        pause: if random.once_in(10) { random.below(ms(900)) } else { 0 },
        to: random.below(shape.routers as u64) as usize,
        must_succeed: false,
        fair_within: None,
        is_in_race: false,
    }
}

/// The faults, with the end of each.
fn faults(shape: &Shape, random: &mut Random) -> Vec<(Time, Fault)> {
    let mut faults = Vec::new();
    for _ in 0..random.of(&[0, 1, 2, 3, 4, 6, 8]) {
        let at = random.below(HEALED - ms(200));
        let any = random.below(shape.slots() as u64) as usize;
        let worker = random.between(shape.routers as u64, shape.slots() as u64 - 1) as usize;
        let other = random.between(shape.routers as u64, shape.slots() as u64 - 1) as usize;
        let range = ms(random.of(&[3, 3, 40, 400]));
        let later = at + ms(1) + random.below(range);
        let slot = if random.once_in(5) { any } else { worker };
        match random.below(23) {
            0..=5 => {
                faults.push((at, Fault::Crash { slot, silent: random.once_in(3) }));
                faults.push((later, Fault::Restart { slot }));
            }
            6..=10 => {
                faults.push((at, Fault::Stall { slot }));
                faults.push((later + ms(random.of(&[5, 300, 1_000])), Fault::Resume { slot }));
            }
            11 | 12 => faults.push((at, Fault::Cut { slot: worker, other })),
            13 => faults.push((at, Fault::Part { slot: worker, other, silent: random.once_in(2) })),
            14 | 15 => {
                faults.push((at, Fault::Drain { slot: worker }));
                faults.push((later + ms(200), Fault::Crash { slot: worker, silent: false }));
                faults.push((later + ms(210), Fault::Restart { slot: worker }));
            }
            16 => faults.push((at, Fault::BreakWatch { router: random.below(shape.routers as u64) as usize })),
            17 => faults.push((at, Fault::EtcdWiped { all: random.once_in(2) })),
            18 => faults.push((at, Fault::EtcdAway { ms: random.between(50, 900) })),
            19 => faults.push((at, Fault::EtcdLosesRecords)),
            20 | 21 => faults.push((at, Fault::Damage { slot: worker })),
            // One, or all: a request that breaks two workers is given up.
            _ if random.once_in(2) => faults.push((at, Fault::DeviceFails { slot: worker })),
            _ => faults.extend((shape.routers..shape.slots()).map(|slot| (at, Fault::DeviceFails { slot }))),
        }
    }
    faults.push((HEALED, Fault::Heal));
    faults
}
