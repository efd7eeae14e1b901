//! The router's index of cached prefixes, full: its memory, lookups of whole prompts, and events of one block each.

use crate::machine;
use crate::statistics::{best, histogram};
use crate::summary::{Figure, Summary, Target};
use anyhow::ensure;
use baton_kv_cache::{Applied, CacheChange, CacheUpdate, HASH_TOKENS, PrefixHash, PrefixIndex};
use baton_types::{Incarnation, InstanceId};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::time::Instant;

const BLOCKS: usize = 10_000_000;
const WORKERS: usize = 64;
/// Blocks of a prompt.
const PROMPT: usize = 256;
const PROMPTS: usize = BLOCKS / PROMPT;
const LOOKUPS: usize = 50_000;
/// Prompts that a quarter of the workers have begun, too.
const SPREAD: usize = 2_000;
/// Prompts that are removed and stored again in a round of events.
const CHURN: usize = 4_000;
const ROUNDS: usize = 5;
const INCARNATION: Incarnation = Incarnation(1);
/// What is promised.
const MEMORY_GIB: f64 = 2.0;
const LOOKUP_US: f64 = 20.0;
const EVENTS_PER_S: f64 = 1e6;

/// The index, and the number of each worker's last event.
struct Filled {
    index: PrefixIndex,
    workers: Vec<InstanceId>,
    sequences: Vec<u64>,
}

/// Names of one prompt: counted up and scattered by the finalizer of SplitMix64, since hashing them would take longer than what is measured.
fn names(prompt: usize) -> Vec<PrefixHash> {
    let scatter = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let half = |counter: usize| u128::from(scatter((counter as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let name = |block: usize| PrefixHash((half(2 * block) << 64 | half(2 * block + 1)).to_le_bytes());
    (0..PROMPT).map(|i| name(prompt * PROMPT + i)).collect()
}

/// A worker, and how many blocks of a prompt it has.
type Holder = (usize, usize);

/// Who has a prompt: one worker all, the next one half.
fn holders(prompt: usize) -> Vec<Holder> {
    vec![(prompt % WORKERS, PROMPT), ((prompt + 1) % WORKERS, PROMPT / 2)]
}

/// Who has a prompt that is [spread](SPREAD) besides: workers whose hits end far from one another, each inside another stretch.
fn spread_holders(prompt: usize) -> Vec<Holder> {
    (2..18).map(|i| ((prompt + i) % WORKERS, (i - 2) * 16 + 9)).collect()
}

impl Filled {
    fn new() -> anyhow::Result<Self> {
        let workers =
            (0..WORKERS).map(|i| InstanceId::try_new(format!("worker-{i}"))).collect::<Result<Vec<_>, _>>()?;
        let mut filled = Self { index: PrefixIndex::new(BLOCKS, rand::random()), workers, sequences: vec![0; WORKERS] };
        for worker in &filled.workers {
            filled.index.join(worker, INCARNATION, HASH_TOKENS as u32)?;
            let change = CacheChange::Snapshot { part: 0, last: true, blocks: &[] };
            filled.index.apply(worker, CacheUpdate { incarnation: INCARNATION, sequence: 0, change });
        }
        for prompt in 0..PROMPTS {
            let names = names(prompt);
            for (worker, held) in holders(prompt) {
                filled.event(worker, CacheChange::Stored(&names[..held]))?;
            }
        }
        Ok(filled)
    }

    fn event(&mut self, worker: usize, change: CacheChange<'_>) -> anyhow::Result<()> {
        self.sequences[worker] += 1;
        let update = CacheUpdate { incarnation: INCARNATION, sequence: self.sequences[worker], change };
        let applied = self.index.apply(&self.workers[worker], update);
        ensure!(applied == Applied::Done, "an event in its turn is {applied:?}: no figures");
        Ok(())
    }

    /// Seconds of the lookup of one prompt, whose answer must be right.
    fn lookup(&self, prompt: usize, holders: &[Holder]) -> anyhow::Result<f64> {
        let names = names(prompt);
        let begin = Instant::now();
        let found = self.index.lookup(&names);
        let time = begin.elapsed().as_secs_f64();
        ensure!(found.len() == holders.len(), "{} workers have prompt {prompt}: no figures", found.len());
        for (worker, held) in holders {
            let right = |f: &&_| {
                **f == baton_kv_cache::CachedPrefix { worker: &self.workers[*worker], tokens: held * HASH_TOKENS }
            };
            ensure!(found.iter().find(right).is_some(), "wrong hits of prompt {prompt}: no figures");
        }
        Ok(time)
    }

    /// Lets many workers begin some prompts, and looks those up: microseconds, the median and the 99th percentile.
    fn spread(&mut self, random: &mut StdRng) -> anyhow::Result<(f64, f64)> {
        // Apart from one another, so that they do not lie together in memory.
        let prompts: Vec<_> = (0..SPREAD).map(|i| i * (PROMPTS / SPREAD)).collect();
        for prompt in &prompts {
            let names = names(*prompt);
            for (worker, held) in spread_holders(*prompt) {
                self.event(worker, CacheChange::Stored(&names[..held]))?;
            }
        }
        let mut lookup = || {
            let prompt = prompts[random.random_range(0..SPREAD)];
            self.lookup(prompt, &[holders(prompt), spread_holders(prompt)].concat())
        };
        let times = (0..LOOKUPS / 5).map(|_| lookup()).collect::<anyhow::Result<Vec<_>>>()?;
        let times = histogram(&times)?;
        Ok((times.value_at_quantile(0.5) as f64 / 1e3, times.value_at_quantile(0.99) as f64 / 1e3))
    }

    /// Events a second: prompts leave their first holder leaf by leaf, and come back.
    fn churn(&mut self, prompts: &[usize]) -> anyhow::Result<f64> {
        let named: Vec<_> = prompts.iter().map(|prompt| (prompt % WORKERS, names(*prompt))).collect();
        let begin = Instant::now();
        for (worker, names) in &named {
            names
                .iter()
                .rev()
                .try_for_each(|name| self.event(*worker, CacheChange::Removed(std::slice::from_ref(name))))?;
        }
        for (worker, names) in &named {
            names.iter().try_for_each(|name| self.event(*worker, CacheChange::Stored(std::slice::from_ref(name))))?;
        }
        Ok((2 * prompts.len() * PROMPT) as f64 / begin.elapsed().as_secs_f64())
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("the index of cached prefixes: {BLOCKS} blocks over {WORKERS} workers");
    let before = machine::resident_bytes()?;
    let mut filled = Filled::new()?;
    let memory = (machine::resident_bytes()? - before) / f64::from(1 << 30);
    let counts = filled.index.counts();
    ensure!(counts.blocks == PROMPTS * PROMPT && counts.refused == 0, "{counts:?} held: no figures");
    let mut random = StdRng::seed_from_u64(7);
    let mut any_prompt = || random.random_range(0..PROMPTS);

    let mut lookup = |filled: &Filled| {
        let prompt = any_prompt();
        filled.lookup(prompt, &holders(prompt))
    };
    let times = histogram(&(0..LOOKUPS).map(|_| lookup(&filled)).collect::<anyhow::Result<Vec<_>>>()?)?;
    let (middle, high) = (times.value_at_quantile(0.5) as f64 / 1e3, times.value_at_quantile(0.99) as f64 / 1e3);
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        let mut prompts: Vec<_> = (0..CHURN).map(|_| any_prompt()).collect();
        prompts.sort_unstable();
        prompts.dedup();
        rates.push(filled.churn(&prompts)?);
        ensure!(filled.index.counts() == counts, "events lost blocks: no figures");
        prompts.iter().try_for_each(|prompt| filled.lookup(*prompt, &holders(*prompt)).map(drop))?;
    }
    let rate = best(rates);
    let (spread_middle, spread_high) = filled.spread(&mut random)?;

    let of =
        format!("{MEMORY_GIB} GiB; resident, {:.0} bytes a block", memory * f64::from(1 << 30) / counts.blocks as f64);
    summary.add("index_memory", Figure::ratio(memory, "GiB", memory / MEMORY_GIB, of), Target::AtMost(1.0));
    let of = format!("{LOOKUP_US} µs; median {middle:.1} µs");
    summary.add("index_lookup_p99", Figure::ratio(high, "µs", high / LOOKUP_US, of), Target::AtMost(1.0));
    let of = format!("{LOOKUP_US} µs; median {spread_middle:.1} µs; 18 workers have it, whose hits end apart");
    let spread = Figure::ratio(spread_high, "µs", spread_high / LOOKUP_US, of);
    summary.add("index_lookup_spread_p99", spread, None);
    let of = format!("{EVENTS_PER_S:.0} a second on one core, of one block each; best of {ROUNDS} rounds");
    summary.add("index_events", Figure::ratio(rate, "events/s", rate / EVENTS_PER_S, of), Target::AtLeast(1.0));
    Ok(())
}
