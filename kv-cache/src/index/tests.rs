use super::*;
use crate::PrefixHasher;
use baton_types::Digest;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const SECRET: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];

fn name(worker: usize) -> InstanceId {
    InstanceId::try_new(format!("w{worker}")).unwrap()
}

/// Hashes of a prompt that shares nothing with others.
fn chain(salt: u32, groups: u32) -> Vec<PrefixHash> {
    let tokens: Vec<u32> = (0..16 * groups).map(|t| t + 1000 * salt).collect();
    PrefixHasher::new(&Digest([7; 32]), b"").prompt(&tokens, &[])
}

fn send(index: &mut PrefixIndex, worker: usize, sequence: u64, change: CacheChange<'_>) -> Applied {
    index.apply(&name(worker), CacheUpdate { incarnation: Incarnation(1), sequence, change })
}

fn snapshot(index: &mut PrefixIndex, worker: usize, sequence: u64, blocks: &[PrefixHash]) -> Applied {
    send(index, worker, sequence, CacheChange::Snapshot { part: 0, last: true, blocks })
}

/// Current workers with nothing cached and blocks of 16 tokens, whose next event is number 1.
fn index_of(workers: usize, blocks_max: usize) -> PrefixIndex {
    index_with(SECRET, workers, blocks_max)
}

fn index_with(secret: [u64; 2], workers: usize, blocks_max: usize) -> PrefixIndex {
    let mut index = PrefixIndex::new(blocks_max, secret);
    for worker in 0..workers {
        index.join(&name(worker), Incarnation(1), 16).unwrap();
        assert_eq!(snapshot(&mut index, worker, 0, &[]), Applied::Done);
    }
    index
}

/// Workers and the number of groups that each has, ascending.
fn hits(index: &PrefixIndex, chain: &[PrefixHash]) -> Vec<(String, usize)> {
    let mut hits: Vec<_> = index.lookup(chain).iter().map(|h| (h.worker.to_string(), h.tokens / 16)).collect();
    hits.sort();
    hits
}

fn hit(worker: usize, groups: usize) -> (String, usize) {
    (name(worker).to_string(), groups)
}

#[test]
fn a_hit_is_as_long_as_what_is_held() {
    let mut index = index_of(3, 1000);
    let prompt = chain(0, 100);
    send(&mut index, 0, 1, CacheChange::Stored(&prompt[..70]));
    send(&mut index, 1, 1, CacheChange::Stored(&prompt));
    assert_eq!(hits(&index, &prompt), [hit(0, 70), hit(1, 100)]);
    assert_eq!(hits(&index, &prompt[..5]), [hit(0, 5), hit(1, 5)]);
    send(&mut index, 1, 2, CacheChange::Removed(&prompt[40..]));
    assert_eq!(hits(&index, &prompt), [hit(0, 70), hit(1, 40)]);
    send(&mut index, 1, 3, CacheChange::Stored(&prompt[40..41]));
    send(&mut index, 2, 1, CacheChange::Stored(&prompt[..1]));
    assert_eq!(hits(&index, &prompt), [hit(0, 70), hit(1, 41), hit(2, 1)]);
    assert_eq!(hits(&index, &chain(1, 10)), []);
    assert_eq!(hits(&index, &[]), []);
}

#[test]
fn blocks_of_every_size_are_whole() {
    let prompt = chain(0, 24);
    let mut index = PrefixIndex::new(1000, SECRET);
    for (worker, groups) in [1, 2, 3, 8].into_iter().enumerate() {
        index.join(&name(worker), Incarnation(1), 16 * groups as u32).unwrap();
        let named: Vec<_> = prompt.iter().skip(groups - 1).step_by(groups).copied().collect();
        snapshot(&mut index, worker, 0, &named);
    }
    assert_eq!(hits(&index, &prompt), [hit(0, 24), hit(1, 24), hit(2, 24), hit(3, 24)]);
    assert_eq!(hits(&index, &prompt[..23]), [hit(0, 23), hit(1, 22), hit(2, 21), hit(3, 16)]);
    assert_eq!(hits(&index, &prompt[..7]), [hit(0, 7), hit(1, 6), hit(2, 6)]);
    // All blocks that end after group 17.
    for worker in 0..4 {
        send(&mut index, worker, 1, CacheChange::Removed(&prompt[17..]));
    }
    assert_eq!(hits(&index, &prompt), [hit(0, 17), hit(1, 16), hit(2, 15), hit(3, 16)]);
    index.leave(&name(0));
    index.leave(&name(2));
    assert_eq!(hits(&index, &prompt), [hit(1, 16), hit(3, 16)]);
    for bad in [0, 8, 24, 144] {
        assert_eq!(index.join(&name(9), Incarnation(1), bad), Err(JoinError::BlockTokens(bad)));
    }
}

#[test]
fn a_gap_hides_the_worker_until_its_snapshot() {
    let mut index = index_of(2, 1000);
    let prompt = chain(0, 8);
    for worker in 0..2 {
        send(&mut index, worker, 1, CacheChange::Stored(&prompt));
    }
    // Event 2 is missing.
    assert_eq!(send(&mut index, 0, 3, CacheChange::Stored(&chain(1, 1))), Applied::SnapshotNeeded);
    assert!(index.is_lost(&name(0)));
    assert_eq!(index.blocks_of(&name(0)), 0);
    assert_eq!(hits(&index, &prompt), [hit(1, 8)]);
    assert_eq!(send(&mut index, 0, 4, CacheChange::Stored(&prompt)), Applied::SnapshotNeeded);
    assert_eq!(hits(&index, &prompt), [hit(1, 8)]);
    // A snapshot from before the missing event does not help.
    assert_eq!(snapshot(&mut index, 0, 3, &prompt), Applied::SnapshotNeeded);
    assert_eq!(hits(&index, &prompt), [hit(1, 8)]);
    assert_eq!(snapshot(&mut index, 0, 4, &prompt[..3]), Applied::Done);
    assert_eq!(hits(&index, &prompt), [hit(0, 3), hit(1, 8)]);
    assert_eq!(send(&mut index, 0, 5, CacheChange::Stored(&prompt[3..5])), Applied::Done);
    assert_eq!((hits(&index, &prompt), index.blocks_of(&name(0))), (vec![hit(0, 5), hit(1, 8)], 5));
}

#[test]
fn what_is_old_changes_nothing() {
    let mut index = index_of(1, 1000);
    let prompt = chain(0, 8);
    assert_eq!(send(&mut index, 0, 1, CacheChange::Stored(&prompt)), Applied::Done);
    assert_eq!(send(&mut index, 0, 2, CacheChange::Removed(&prompt[4..])), Applied::Done);
    assert_eq!(send(&mut index, 0, 1, CacheChange::Stored(&prompt)), Applied::Stale);
    assert_eq!(send(&mut index, 0, 2, CacheChange::Removed(&prompt)), Applied::Stale);
    assert_eq!(snapshot(&mut index, 0, 2, &prompt), Applied::Stale);
    assert_eq!(snapshot(&mut index, 0, 1, &prompt), Applied::Stale);
    assert_eq!(hits(&index, &prompt), [hit(0, 4)]);
    // A block that is stored or removed twice counts once.
    assert_eq!(send(&mut index, 0, 3, CacheChange::Stored(&prompt[..2])), Applied::Done);
    assert_eq!(send(&mut index, 0, 4, CacheChange::Removed(&prompt[7..])), Applied::Done);
    assert_eq!(index.blocks_of(&name(0)), 4);
    // A newer snapshot also replaces a current state.
    assert_eq!(snapshot(&mut index, 0, 9, &prompt[..1]), Applied::Done);
    assert_eq!((hits(&index, &prompt), index.blocks_of(&name(0))), (vec![hit(0, 1)], 1));
    assert_eq!(send(&mut index, 0, 10, CacheChange::Stored(&prompt[1..2])), Applied::Done);
}

#[test]
fn a_snapshot_counts_once_it_is_whole() {
    let mut index = index_of(1, 1000);
    let prompt = chain(0, 9);
    let part = |part: u32, last: bool| CacheChange::Snapshot { part, last, blocks: &prompt[3 * part as usize..][..3] };
    assert_eq!(send(&mut index, 0, 5, part(0, false)), Applied::Done);
    assert_eq!(hits(&index, &prompt), []);
    assert_eq!(send(&mut index, 0, 5, part(1, false)), Applied::Done);
    assert_eq!(send(&mut index, 0, 5, part(1, false)), Applied::Stale);
    assert_eq!(send(&mut index, 0, 4, CacheChange::Stored(&prompt)), Applied::Stale);
    assert!(index.is_lost(&name(0)));
    assert_eq!(send(&mut index, 0, 5, part(2, true)), Applied::Done);
    assert_eq!(hits(&index, &prompt), [hit(0, 9)]);
    // A part is missing.
    assert_eq!(send(&mut index, 0, 6, part(0, false)), Applied::Done);
    assert_eq!(send(&mut index, 0, 6, part(2, true)), Applied::SnapshotNeeded);
    assert_eq!(hits(&index, &prompt), []);
    // A new snapshot replaces the parts of the previous one; an event in between ends it.
    assert_eq!(send(&mut index, 0, 6, part(0, false)), Applied::Done);
    assert_eq!(send(&mut index, 0, 6, part(0, false)), Applied::Done);
    assert_eq!(send(&mut index, 0, 7, CacheChange::Stored(&prompt)), Applied::SnapshotNeeded);
    assert_eq!(send(&mut index, 0, 6, part(1, true)), Applied::SnapshotNeeded);
    assert_eq!(hits(&index, &prompt), []);
    assert_eq!(snapshot(&mut index, 0, 7, &prompt[..1]), Applied::Done);
    assert_eq!((hits(&index, &prompt), index.blocks_of(&name(0))), (vec![hit(0, 1)], 1));
    // A snapshot whose beginning is missing means that events are missing too.
    assert_eq!(send(&mut index, 0, 9, part(1, true)), Applied::SnapshotNeeded);
    assert_eq!(hits(&index, &prompt), []);
}

#[test]
fn another_incarnation_starts_with_nothing() {
    let mut index = index_of(1, 1000);
    let prompt = chain(0, 4);
    send(&mut index, 0, 1, CacheChange::Stored(&prompt));
    assert_eq!(index.join(&name(0), Incarnation(1), 16), Ok(()));
    assert_eq!(hits(&index, &prompt), [hit(0, 4)], "it joined already");
    let from = |incarnation, sequence, change| CacheUpdate { incarnation: Incarnation(incarnation), sequence, change };
    let all = CacheChange::Snapshot { part: 0, last: true, blocks: &prompt[..2] };
    assert_eq!(index.apply(&name(0), from(2, 2, all)), Applied::Unknown);
    index.join(&name(0), Incarnation(2), 16).unwrap();
    assert_eq!(hits(&index, &prompt), []);
    assert_eq!(index.apply(&name(0), from(1, 2, CacheChange::Stored(&prompt))), Applied::Unknown);
    assert_eq!(index.apply(&name(0), from(2, 1, CacheChange::Stored(&prompt))), Applied::SnapshotNeeded);
    assert_eq!(index.apply(&name(0), from(2, 1, all)), Applied::Done);
    assert_eq!(hits(&index, &prompt), [hit(0, 2)]);
    index.leave(&name(0));
    assert_eq!(hits(&index, &prompt), []);
    assert_eq!(index.apply(&name(0), from(2, 2, all)), Applied::Unknown);
}

#[test]
fn a_full_index_refuses_counts_and_takes_up_again() {
    let mut index = index_of(2, 10);
    let (a, b) = (chain(1, 8), chain(2, 8));
    send(&mut index, 0, 1, CacheChange::Stored(&a));
    send(&mut index, 1, 1, CacheChange::Stored(&b));
    let counts = IndexCounts { workers: 2, workers_lost: 0, blocks: 10, refused: 6 };
    assert_eq!(index.counts(), counts);
    assert_eq!((hits(&index, &a), hits(&index, &b)), (vec![hit(0, 8)], vec![hit(1, 2)]));
    // A further holder of a known block needs no room, and removing a refused block does nothing.
    send(&mut index, 1, 2, CacheChange::Stored(&a));
    send(&mut index, 1, 3, CacheChange::Removed(&b[5..]));
    assert_eq!((index.counts(), hits(&index, &a)), (counts, vec![hit(0, 8), hit(1, 8)]));
    index.leave(&name(0));
    send(&mut index, 1, 4, CacheChange::Removed(&a));
    while index.sweep(100) {}
    assert_eq!(index.counts().blocks, 2);
    send(&mut index, 1, 5, CacheChange::Stored(&b));
    assert_eq!(hits(&index, &b), [hit(1, 8)]);
}

#[test]
fn events_alone_sweep_out_what_left() {
    let mut index = index_of(2, 100_000);
    let prompts: Vec<_> = (0..20).flat_map(|salt| chain(salt, 60)).collect();
    send(&mut index, 0, 1, CacheChange::Stored(&prompts));
    assert_eq!(index.counts().blocks, 1200);
    index.leave(&name(0));
    let (one, mut sequence) = (chain(99, 1), 0);
    while index.counts().blocks > 1 {
        sequence += 1;
        send(&mut index, 1, sequence, CacheChange::Stored(&one));
        assert!(sequence < 5_000, "{:?}", index.counts());
    }
    assert!(index.retired.is_empty() && index.slots[0].blocks == 0);
}

#[test]
fn as_many_workers_as_promised() {
    let most = PrefixIndex::WORKERS_MAX;
    let mut index = index_of(most, 10_000);
    assert_eq!(index.join(&name(most), Incarnation(1), 16), Err(JoinError::Workers));
    let prompt = chain(0, 4);
    for worker in 0..most {
        send(&mut index, worker, 1, CacheChange::Stored(&prompt[..1 + worker % 4]));
    }
    let expected: BTreeMap<_, _> = (0..most).map(|worker| hit(worker, 1 + worker % 4)).collect();
    assert_eq!(hits(&index, &prompt), expected.into_iter().collect::<Vec<_>>());
    assert_eq!(index.table.spilled(), 4);
    // More snapshots in a row than there are spare slots.
    for worker in 0..200 {
        assert_eq!(snapshot(&mut index, worker, 2, &prompt), Applied::Done);
    }
    let full = |worker: &usize| *worker < 200 || worker % 4 == 3;
    assert_eq!(hits(&index, &prompt).iter().filter(|h| h.1 == 4).count(), (0..most).filter(full).count());
    (0..most).for_each(|worker| index.leave(&name(worker)));
    while index.sweep(100) {}
    assert_eq!((index.counts().blocks, index.table.spilled()), (0, 0));
    assert_eq!(index.taken, SlotSet::default());
}

#[test]
fn hashes_that_a_worker_chose_spread_as_others_do() {
    let mut index = index_of(1, 100_000);
    // They differ in a few bits at the end of either half.
    let ends: Vec<_> = (0..20_000u128).map(|i| PrefixHash((((i >> 7) << 64) | (i % 128)).to_le_bytes())).collect();
    // Here in the middle of one half.
    let middles: Vec<_> = (0..20_000u128).map(|i| PrefixHash(((1 << 127) | (i << 24)).to_le_bytes())).collect();
    send(&mut index, 0, 1, CacheChange::Stored(&ends));
    send(&mut index, 0, 2, CacheChange::Stored(&middles));
    assert_eq!(index.counts().blocks, 40_000);
    let run = index.table.longest_run();
    assert!(run < 64, "{run} in a row");
}

/// A slow reference: what each current worker holds.
#[derive(Default)]
struct Model {
    holders: HashMap<PrefixHash, BTreeSet<usize>>,
    current: BTreeSet<usize>,
}

impl Model {
    fn forget(&mut self, worker: usize) {
        self.holders.values_mut().for_each(|workers| {
            workers.remove(&worker);
        });
        self.current.remove(&worker);
    }

    fn store(&mut self, worker: usize, blocks: &[PrefixHash]) {
        blocks.iter().for_each(|block| {
            self.holders.entry(*block).or_default().insert(worker);
        });
    }

    fn remove(&mut self, worker: usize, blocks: &[PrefixHash]) {
        blocks.iter().for_each(|block| {
            self.holders.entry(*block).or_default().remove(&worker);
        });
    }

    fn has(&self, worker: usize, block: &PrefixHash) -> bool {
        self.current.contains(&worker) && self.holders.get(block).is_some_and(|workers| workers.contains(&worker))
    }

    /// Whether a hit of the chain may end at a block that the worker does not hold: the only such block, if there are no holes.
    fn may_hit(&self, worker: usize, chain: &[PrefixHash], groups: usize) -> bool {
        let ends = groups == chain.len() || !self.has(worker, &chain[groups]);
        ends && (groups == 0 || self.has(worker, &chain[groups - 1]))
    }

    fn blocks_of(&self, worker: usize) -> usize {
        self.holders.values().filter(|w| self.current.contains(&worker) && w.contains(&worker)).count()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Store(usize, usize, usize),
    Remove(usize, usize, usize),
    Gap(usize),
    Snapshot(usize, usize, usize),
    Restart(usize),
    Leave(usize),
    Sweep(usize),
}

fn steps(workers: usize, blocks: usize) -> impl Strategy<Value = Vec<Step>> {
    let (worker, from, count) = (move || 0..workers, move || 0..blocks, || 0..40usize);
    let step = prop_oneof![
        12 => (worker(), from(), count()).prop_map(|(w, f, n)| Step::Store(w, f, n)),
        8 => (worker(), from(), count()).prop_map(|(w, f, n)| Step::Remove(w, f, n)),
        1 => worker().prop_map(Step::Gap),
        4 => (worker(), from(), count()).prop_map(|(w, f, n)| Step::Snapshot(w, f, n)),
        1 => worker().prop_map(Step::Restart),
        1 => worker().prop_map(Step::Leave),
        1 => (0usize..6000).prop_map(Step::Sweep),
    ];
    proptest::collection::vec(step, 1..400)
}

fn compare(workers: usize, steps: Vec<Step>, hashes: &[PrefixHash]) -> Result<(), TestCaseError> {
    compare_in(index_of(workers, 10_000), workers, steps, hashes)
}

fn compare_in(
    mut index: PrefixIndex,
    workers: usize,
    steps: Vec<Step>,
    hashes: &[PrefixHash],
) -> Result<(), TestCaseError> {
    let mut model = Model::default();
    model.current.extend(0..workers);
    let (mut sequences, mut incarnations) = (vec![0; workers], vec![1; workers]);
    for step in steps {
        let range = |from: usize, count: usize| &hashes[from..hashes.len().min(from + count)];
        let (worker, change) = match step {
            Step::Store(w, f, n) => (w, CacheChange::Stored(range(f, n))),
            Step::Remove(w, f, n) => (w, CacheChange::Removed(range(f, n))),
            Step::Snapshot(w, f, n) => (w, CacheChange::Snapshot { part: 0, last: true, blocks: range(f, n) }),
            Step::Gap(worker) => {
                sequences[worker] += 1;
                continue;
            }
            Step::Leave(worker) => {
                index.leave(&name(worker));
                model.forget(worker);
                incarnations[worker] = 0;
                continue;
            }
            Step::Restart(worker) => {
                incarnations[worker] += 1;
                index.join(&name(worker), Incarnation(incarnations[worker]), 16).unwrap();
                model.forget(worker);
                continue;
            }
            Step::Sweep(entries) => {
                index.sweep(entries);
                continue;
            }
        };
        sequences[worker] += 1;
        let update =
            CacheUpdate { incarnation: Incarnation(incarnations[worker]), sequence: sequences[worker], change };
        match (index.apply(&name(worker), update), change) {
            (Applied::Done, CacheChange::Stored(blocks)) => model.store(worker, blocks),
            (Applied::Done, CacheChange::Removed(blocks)) => model.remove(worker, blocks),
            (Applied::Done, CacheChange::Snapshot { blocks, .. }) => {
                model.forget(worker);
                model.current.insert(worker);
                model.store(worker, blocks);
            }
            (Applied::SnapshotNeeded, _) => model.forget(worker),
            (Applied::Unknown, _) => prop_assert_eq!(incarnations[worker], 0),
            (Applied::Stale, _) => prop_assert!(false, "nothing is sent twice"),
        }
        for worker in 0..workers {
            prop_assert_eq!(index.blocks_of(&name(worker)), model.blocks_of(worker));
        }
        for from in [0, hashes.len() / 2] {
            let found: BTreeMap<_, _> = hits(&index, &hashes[from..]).into_iter().collect();
            for worker in 0..workers {
                let groups = found.get(name(worker).as_str()).copied().unwrap_or(0);
                prop_assert!(model.may_hit(worker, &hashes[from..], groups), "worker {} has {} groups", worker, groups);
            }
        }
    }
    for block in hashes {
        let held: Vec<_> = hits(&index, std::slice::from_ref(block));
        let mut expected: Vec<_> = (0..workers).filter(|w| model.has(*w, block)).map(|w| hit(w, 1)).collect();
        expected.sort();
        prop_assert_eq!(held, expected);
    }
    while index.sweep(10_000) {}
    // After a complete sweep the index holds no more than the model does.
    let filling = model.holders.values().filter(|workers| !workers.is_empty()).count();
    prop_assert_eq!(index.counts().blocks, filling);
    prop_assert_eq!(index.counts().workers_lost + model.current.len(), index.counts().workers);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn it_is_the_plain_map(steps in steps(6, 90)) {
        compare(6, steps, &chain(3, 90))?;
    }

    /// Hashes that share a segment, to test probing, holes and growth.
    #[test]
    fn it_is_the_plain_map_where_names_collide(steps in steps(6, 90), homes in 1u64..30) {
        // Without a secret, the place of a hash whose first half is 1 is its second half: 12 bits for the segment, 32 for the position.
        let name = |i: u64| PrefixHash(u128::to_le_bytes((u128::from((((i % homes) * (u64::MAX / homes)) >> 32 << 20) | i) << 64) | 1));
        compare_in(index_with([0, 0], 6, 10_000), 6, steps, &(0..90).map(name).collect::<Vec<_>>())?;
    }

    /// Workers with blocks of every size, each of which holds the first groups of one chain, as caches do: every hit is exact, whatever the
    /// lookup.
    #[test]
    fn hits_of_caches_are_exact(
        held in proptest::collection::vec((1usize..=8, 0usize..=300), 1..70),
        asked in proptest::collection::vec(0usize..=300, 1..20),
    ) {
        let prompt = chain(5, 300);
        let mut index = PrefixIndex::new(10_000, SECRET);
        for (worker, (groups, held)) in held.iter().enumerate() {
            index.join(&name(worker), Incarnation(1), 16 * *groups as u32).unwrap();
            let blocks: Vec<_> = prompt[..*held].iter().skip(groups - 1).step_by(*groups).copied().collect();
            snapshot(&mut index, worker, 0, &blocks);
        }
        for asked in asked {
            let whole = |(groups, held): &(usize, usize)| held.min(&asked) / groups * groups;
            let expected = held.iter().enumerate().map(|(worker, held)| hit(worker, whole(held)));
            let mut expected: Vec<_> = expected.filter(|(_, groups)| *groups > 0).collect();
            expected.sort();
            prop_assert_eq!(hits(&index, &prompt[..asked]), expected);
        }
    }

    /// More workers than have a bit in the entry.
    #[test]
    fn it_is_the_plain_map_beyond_64_workers(steps in steps(80, 20)) {
        compare(80, steps, &chain(3, 20))?;
    }
}
