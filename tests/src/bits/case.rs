//! A case: one way to serve a world's requests. Cases are dealt like cards, so that every value of every dimension is used.

use baton_kernels::cpu::SimdLevel;
use baton_kv_transfer::{TransportChoice, UcxLanes};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::net::Ipv4Addr;

/// What happens to KV that is no longer referenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// No KV is cached.
    Off,
    /// Cached as long as there is room.
    On,
    /// Cached, and evicted continuously by another thread.
    Churned,
}

/// What happens to blocks of D while P reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// They stay.
    Undisturbed,
    /// They are evicted before P requests them.
    Gone,
    /// The pin expires before the first read, and the blocks are evicted and overwritten.
    Evicted,
    /// As `Evicted`, without the guard: D reports that the pin held.
    Unguarded,
}

/// One engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Most rows of a step with prefill.
    pub chunk: usize,
    /// Most sequences in a step.
    pub running: usize,
    /// Compute threads.
    pub threads: usize,
    /// Instructions of the SIMD kernels; `None` uses the best that the machine has.
    pub simd: Option<SimdLevel>,
    /// Whether the device delays its results.
    pub lagging: bool,
    /// Whether the pool has room for little more than one request, so that sequences are preempted or wait.
    pub tight: bool,
    /// Its prefix cache.
    pub cache: Caching,
    /// Whether the block in which samples diverge is copied. Without the copy, the test shows why it is needed.
    pub copies: bool,
}

/// Where a request's prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// On P, and its KV is put to D.
    Remote,
    /// As `Remote`, and P first gets what D has cached of it.
    Got,
    /// On D.
    Local,
}

impl Route {
    /// Whether D receives the KV from P.
    pub fn is_shipped(self) -> bool {
        self != Self::Local
    }
}

/// How one request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Where prefill runs.
    pub route: Route,
    /// Tokens of its output that count as generated before: they are prefilled with the prompt, while the reference decoded them.
    pub continued: u32,
}

/// The arrival times of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// All at the same time.
    Together,
    /// One more with each token or two, so that requests join running batches.
    Staggered,
    /// Each when the one before has ended, so that it finds in a cache what that one has stored there.
    InTurn,
    /// Nothing decodes until every request that finds room is ready: all are in one batch, as far as the batch allows.
    Gathered,
}

/// One way to serve all requests.
#[derive(Clone, Debug)]
pub struct Case {
    /// The prefilling engine.
    pub p: Setup,
    /// The decoding engine.
    pub d: Setup,
    /// Whether UCX carries KV; TCP otherwise.
    pub ucx: bool,
    /// Arrival times of the requests.
    pub arrivals: Arrivals,
    /// What happens to blocks that are read.
    pub read: Read,
    /// For each request, in order.
    pub plans: Vec<Plan>,
    /// The order of arrival.
    pub order: Vec<usize>,
}

impl Case {
    /// All requests by one route to a D with little room. Those that first outgrow their blocks come first, so that some must be
    /// preempted. `sizes` are the tokens of each prompt and output.
    pub fn preempting(block_tokens: u32, route: Route, sizes: &[(usize, u32)]) -> Self {
        let block = block_tokens as usize;
        let running = sizes.len();
        let setup = Setup {
            block_tokens,
            chunk: 256,
            running,
            threads: 2,
            simd: None,
            lagging: false,
            tight: true,
            cache: Caching::On,
            copies: true,
        };
        let mut order: Vec<_> = (0..sizes.len()).collect();
        order.sort_by_key(|&index| (sizes[index].0.next_multiple_of(block) - sizes[index].0, sizes[index].0));
        let plans = vec![Plan { route, continued: 0 }; sizes.len()];
        // Requests with KV from P decode when D is full: otherwise one could end before the next arrives.
        let arrivals = if route.is_shipped() { Arrivals::Gathered } else { Arrivals::Together };
        Self { p: setup, d: setup, ucx: false, arrivals, read: Read::Undisturbed, plans, order }
    }

    /// Requests one after another, every other one on D alone. So the others find blocks on D that P lacks, and get them. `(p, d)` are
    /// the block sizes of P and D.
    pub fn getting((p, d): (u32, u32), churn: bool, read: Read, sizes: &[(usize, u32)]) -> Self {
        let cache = if churn { Caching::Churned } else { Caching::On };
        let setup = |block_tokens, cache| Setup {
            block_tokens,
            chunk: 100,
            running: 5,
            threads: 2,
            simd: None,
            lagging: false,
            tight: false,
            cache,
            copies: true,
        };
        let routes = [Route::Local, Route::Got].into_iter().cycle();
        let plans = routes.map(|route| Plan { route, continued: 0 }).take(sizes.len()).collect();
        let (arrivals, order) = (Arrivals::InTurn, (0..sizes.len()).collect());
        Self { p: setup(p, Caching::On), d: setup(d, cache), ucx: p == d, arrivals, read, plans, order }
    }

    /// All requests at once by one route, to engines with these block sizes. Samples of one request diverge at the end of its prompt.
    pub fn sampling((p, d): (u32, u32), route: Route, copies: bool, sizes: &[(usize, u32)]) -> Self {
        let setup = |block_tokens| Setup {
            block_tokens,
            chunk: 64,
            running: sizes.len(),
            threads: 2,
            simd: None,
            lagging: true,
            tight: false,
            cache: Caching::On,
            copies,
        };
        let plans = vec![Plan { route, continued: 0 }; sizes.len()];
        let (arrivals, order) = (Arrivals::Together, (0..sizes.len()).collect());
        Self { p: setup(p), d: setup(d), ucx: p == d, arrivals, read: Read::Undisturbed, plans, order }
    }

    pub(super) fn transport(&self) -> TransportChoice {
        match self.ucx {
            true => TransportChoice::ucx(UcxLanes::SharedMemory, Ipv4Addr::LOCALHOST.into()),
            false => TransportChoice::Tcp { bind: Ipv4Addr::LOCALHOST.into(), port: 0 },
        }
    }

    /// Gathered requests hold blocks and batch slots while they wait for each other: with too few of these they would wait forever. D
    /// knows that no more requests find room only if all arrive from P.
    pub(super) fn can_gather(&self) -> bool {
        let room = !self.d.tight || self.plans.iter().all(|plan| plan.route.is_shipped());
        room && self.d.running >= self.plans.len()
    }
}

/// Deals the values of one dimension from a shuffled deck: each is used once before any is used again.
struct Deck<T> {
    values: Vec<T>,
    left: Vec<T>,
}

impl<T: Copy> Deck<T> {
    fn new(values: &[T]) -> Self {
        Self { values: values.to_vec(), left: Vec::new() }
    }

    fn deal(&mut self, rng: &mut StdRng) -> T {
        if self.left.is_empty() {
            self.left = self.values.clone();
            self.left.shuffle(rng);
        }
        self.left.pop().expect("a deck has cards")
    }
}

/// Deals cases.
pub struct Dealer {
    rng: StdRng,
    blocks: Deck<(u32, u32)>,
    chunks: [Deck<usize>; 2],
    running: [Deck<usize>; 2],
    threads: Deck<(usize, usize)>,
    lagging: Deck<(bool, bool)>,
    tight: Deck<(bool, bool)>,
    cache: Deck<(Caching, Caching)>,
    ucx: Deck<bool>,
    arrivals: Deck<Arrivals>,
    plans: Deck<(Route, bool)>,
    /// Instructions of P and D, one pair a case, the next one first.
    levels: Vec<(SimdLevel, SimdLevel)>,
}

impl Dealer {
    /// Block sizes of P and D.
    pub const BLOCKS: [(u32, u32); 4] = [(16, 16), (64, 64), (16, 64), (64, 16)];
    /// Chunk sizes: single tokens, ragged chunks, multiples of a slab, the whole prompt.
    pub const CHUNKS: [usize; 6] = [1, 7, 33, 64, 100, 256];
    /// Sizes of the running batch.
    pub const RUNNING: [usize; 3] = [1, 16, 5];

    /// Deals P and D different instructions, each of these levels that the machine has to both; without two of them, its best to both.
    pub fn with_instructions(mut self, levels: &[SimdLevel]) -> Self {
        let levels: Vec<_> = levels.iter().copied().filter(|level| level.available()).collect();
        let others = levels.iter().cycle().skip(1);
        self.levels = levels.iter().copied().zip(others.copied()).filter(|(p, d)| p != d).collect();
        self
    }

    /// The same seed deals the same cases.
    pub fn new(seed: u64) -> Self {
        use Caching::{Churned, Off, On};
        use Route::{Got, Local, Remote};
        let pairs = [(false, false), (true, false), (false, true), (true, true)];
        Self {
            rng: StdRng::seed_from_u64(seed),
            blocks: Deck::new(&Self::BLOCKS),
            chunks: [Deck::new(&Self::CHUNKS), Deck::new(&Self::CHUNKS)],
            running: [Deck::new(&Self::RUNNING), Deck::new(&Self::RUNNING)],
            threads: Deck::new(&[(1, 1), (1, 2), (2, 1), (2, 2)]),
            lagging: Deck::new(&pairs),
            tight: Deck::new(&pairs),
            cache: Deck::new(&[(On, On), (Off, Off), (Churned, On), (On, On), (On, Churned), (Off, On), (On, Off)]),
            ucx: Deck::new(&[true, false]),
            arrivals: Deck::new(&[Arrivals::Together, Arrivals::Staggered, Arrivals::Gathered]),
            plans: Deck::new(&[
                (Remote, false),
                (Remote, false),
                (Remote, true),
                (Got, false),
                (Got, true),
                (Local, false),
                (Local, true),
            ]),
            levels: Vec::new(),
        }
    }

    /// The next case for requests of these sizes: the tokens of each prompt and output.
    pub fn deal(&mut self, sizes: &[(usize, u32)]) -> Case {
        let rng = &mut self.rng;
        let (blocks, threads) = (self.blocks.deal(rng), self.threads.deal(rng));
        let (lagging, tight, cache) = (self.lagging.deal(rng), self.tight.deal(rng), self.cache.deal(rng));
        let [p_chunk, d_chunk] = self.chunks.each_mut().map(|deck| deck.deal(rng));
        let [p_running, d_running] = self.running.each_mut().map(|deck| deck.deal(rng));
        let setup = |block_tokens, chunk, running, threads, (lagging, tight, cache)| Setup {
            block_tokens,
            chunk,
            running,
            threads,
            simd: None,
            lagging,
            tight,
            cache,
            copies: true,
        };
        let mut plan = |&(_, outputs): &(usize, u32)| {
            let (route, continued) = self.plans.deal(rng);
            // A handoff moves a sequence that generates at least one token after its first.
            let continued = if continued && outputs > 2 { rng.random_range(1..=outputs - 2) } else { 0 };
            Plan { route, continued }
        };
        let plans: Vec<_> = sizes.iter().map(&mut plan).collect();
        let mut order: Vec<_> = (0..plans.len()).collect();
        order.shuffle(rng);
        let mut case = Case {
            p: setup(blocks.0, p_chunk, p_running, threads.0, (lagging.0, tight.0, cache.0)),
            d: setup(blocks.1, d_chunk, d_running, threads.1, (lagging.1, tight.1, cache.1)),
            ucx: self.ucx.deal(rng),
            arrivals: self.arrivals.deal(rng),
            read: Read::Undisturbed,
            plans,
            order,
        };
        if let Some(&(p, d)) = self.levels.first() {
            (case.p.simd, case.d.simd) = (Some(p), Some(d));
            self.levels.rotate_left(1);
        }
        if case.arrivals == Arrivals::Gathered && !case.can_gather() {
            // Gathering tests the full batch: give it room instead of dealing another value.
            (case.d.tight, case.d.running) = (false, case.plans.len());
        }
        case
    }
}
