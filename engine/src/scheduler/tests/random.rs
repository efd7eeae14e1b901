//! Random arrivals, cancellations and leases held outside: every sequence ends.

use super::*;
use baton_kv_cache::{Keep, PrefixHash};
use baton_types::{TenantLabel, Weight};
use proptest::prelude::*;
use std::ops::Range;

#[derive(Clone, Debug)]
enum Event {
    Add {
        len: usize,
        priority: i32,
        pinned: bool,
        scored: bool,
    },
    /// One of a few prompts, each used by several sequences at once.
    Sample {
        prompt: u8,
        priority: i32,
        pinned: bool,
        scored: bool,
    },
    Adopt {
        len: usize,
    },
    Cancel(usize),
    Lease(usize),
    Unlease,
    Step,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (1usize..30, -1i32..2, any::<bool>(), any::<bool>())
            .prop_map(|(len, priority, pinned, scored)| Event::Add { len, priority, pinned, scored }),
        3 => (0u8..3, -1i32..2, any::<bool>(), any::<bool>())
            .prop_map(|(prompt, priority, pinned, scored)| Event::Sample { prompt, priority, pinned, scored }),
        1 => (2usize..12).prop_map(|len| Event::Adopt { len }),
        1 => any::<usize>().prop_map(Event::Cancel),
        1 => (1usize..4).prop_map(Event::Lease),
        1 => Just(Event::Unlease),
        8 => Just(Event::Step),
    ];
    proptest::collection::vec(event, 1..80)
}

/// Sequences grow to this length and end; it always fits the pool of 8 blocks.
const LEN_MAX: usize = 32;

struct Run {
    world: World,
    config: SchedulerConfig,
    /// Length of each live sequence, and whether it ends with its first token.
    live: HashMap<SequenceKey, (usize, bool)>,
    /// Positions of each whose logits have not come back.
    scored: HashMap<SequenceKey, Range<usize>>,
}

impl Run {
    fn step(&mut self) -> Result<(), TestCaseError> {
        let w = &mut self.world;
        let mut scheduler = std::mem::replace(&mut w.scheduler, Scheduler::new(self.config, w.pool.clone()));
        let decisions = scheduler.plan(w.now, w);
        decisions.started.iter().for_each(|key| w.order.served(key.priority(), key.start()));
        let totals = scheduler.totals();
        prop_assert!(totals.held_tokens <= totals.blocks * 4, "{:?}", totals);
        let rows: usize = decisions.batch.iter().map(|s| s.rows).sum();
        let prefill: usize = decisions.batch.iter().filter(|s| !s.decode).map(|s| s.rows).sum();
        prop_assert!(rows == prefill || prefill <= self.config.mixed_chunk_tokens_max);
        prop_assert!(rows <= self.config.chunk_tokens_max.max(self.config.running_max));
        prop_assert!(decisions.batch.len() <= self.config.running_max);
        let scored: usize = decisions.batch.iter().map(|s| s.scored).sum();
        prop_assert!(scored <= self.config.scored_rows_max, "logits of {} rows come back", scored);
        let mut written = BTreeSet::new();
        for s in &decisions.batch {
            let blocks = scheduler.lease(s.key).unwrap().blocks().0.swap_remove(0);
            prop_assert!(blocks.len() * 4 >= s.position + s.rows, "blocks for every row");
            let writes = &blocks[s.position / 4..(s.position + s.rows).div_ceil(4)];
            prop_assert!(writes.iter().all(|b| written.insert(*b)), "one writer per block");
            let mut others = self.live.keys().filter(|key| **key != s.key).filter_map(|key| scheduler.lease(*key));
            prop_assert!(
                !others.any(|lease| lease.blocks().0[0].iter().any(|b| writes.contains(b))),
                "nobody else has it"
            );
            let (len, once) = self.live[&s.key];
            prop_assert_eq!(s.samples, s.position + s.rows == len);
            let scored = self.scored.get_mut(&s.key).expect("it is live");
            let end = scored.end.min(s.position + s.rows).max(scored.start);
            prop_assert!(s.scored == end - scored.start, "each once, and none left out: {:?} of {:?}", s, scored);
            prop_assert!(s.scored == 0 || s.scored_from == scored.start);
            scored.start = end;
            prop_assert!(!s.samples || scored.start == scored.end, "all of them before the first token");
            scheduler.advance(s.key, s.rows, s.samples, Rest::Nothing, w.now);
            if s.samples {
                scheduler.fork_for_waiting(s.key);
            }
            if s.samples && (once || len + 1 == LEN_MAX) {
                prop_assert!(scheduler.remove(s.key).is_some());
                self.live.remove(&s.key);
            } else if s.samples {
                self.live.insert(s.key, (len + 1, once));
            }
        }
        prop_assert!(decisions.preempted.iter().all(|key| !self.live[key].1 || !decisions.started.contains(key)));
        w.scheduler = scheduler;
        Ok(())
    }
}

proptest! {
    #[test]
    fn every_sequence_comes_to_its_end(
        chunk in 1usize..12, mixed in 1usize..12, running in 1usize..6, watermark in 0usize..3, scored_max in 1usize..6, tenants in 1u64..4,
        events in events(),
    ) {
        let bounds = SchedulerConfig { chunk_tokens_max: chunk, running_max: running, ..config() };
        let bounds = SchedulerConfig { mixed_chunk_tokens_max: mixed, ..bounds };
        let config = SchedulerConfig { watermark_blocks: watermark, scored_rows_max: scored_max, ..bounds };
        let mut run = Run { world: World::new(8, config), config, live: HashMap::new(), scored: HashMap::new() };
        let mut outside = Vec::new();
        for event in events {
            let w = &mut run.world;
            let of = w.next % tenants;
            w.share = Share { tenant: TenantLabel(of), weight: Weight::try_new(1 + of as u32).unwrap() };
            match event {
                Event::Add { len, priority, pinned, scored } => {
                    let scored = if scored { 0..len - 1 } else { 0..0 };
                    let key = w.add(priority, Arrival { pinned, scored: scored.clone(), ..w.arrival(len) });
                    run.scored.insert(key, scored);
                    run.live.insert(key, (len, pinned));
                }
                Event::Sample { prompt, priority, pinned, scored } => {
                    let len = [9, 14, 20][usize::from(prompt)];
                    let scored = if scored { 0..len - 1 } else { 0..0 };
                    let prefix = Prefix { hashes: vec![], whole: PrefixHash([prompt; 16]), keep: Keep::idle(SECOND) };
                    let key = w.add(priority, Arrival { pinned, prefix: Some(prefix), scored: scored.clone(), ..w.arrival(len) });
                    run.scored.insert(key, scored);
                    w.scheduler.fork_for_new(key);
                    run.live.insert(key, (len, pinned));
                }
                Event::Adopt { len } => {
                    if w.pool.free_min() * 4 + 1 >= len {
                        let key = w.adopted(len);
                        run.scored.insert(key, 0..0);
                        run.live.insert(key, (len, false));
                    }
                }
                Event::Cancel(i) => {
                    let mut keys: Vec<_> = run.live.keys().copied().collect();
                    keys.sort_unstable();
                    if let Some(key) = keys.get(i % keys.len().max(1)) {
                        w.scheduler.remove(*key);
                        run.live.remove(key);
                    }
                }
                Event::Lease(n) => outside.extend(w.pool.try_lease(&[n])),
                Event::Unlease => drop(outside.pop()),
                Event::Step => run.step()?,
            }
        }
        // Once no blocks are held outside, every sequence ends. Each step advances the first one, and a restart of others costs at most
        // their whole length per token of those before them.
        outside.clear();
        let mut steps = 0;
        while !run.live.is_empty() {
            run.step()?;
            steps += 1;
            prop_assert!(steps < 20_000, "no progress: {:?}", run.world.scheduler);
        }
        prop_assert_eq!(run.world.pool.counts().referenced, 0);
    }
}
