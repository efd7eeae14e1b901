use super::*;
use proptest::prelude::*;

fn ids(blocks: &GroupBlocks) -> Vec<Vec<u32>> {
    blocks.0.iter().map(|g| g.iter().map(|b| b.0).collect()).collect()
}

/// Recomputes the counts from the states alone.
fn check_books(pool: &BlockPool) {
    let mut counts = BlockCounts::default();
    for group in &pool.groups {
        counts.total += group.states.len();
        let mut free = Vec::new();
        for (id, state) in group.states.iter().enumerate() {
            *counts.of(*state) += 1;
            if *state == BlockState::Free {
                free.push(id as u32);
            }
        }
        assert_eq!(group.free.ids(), free);
        assert_eq!(group.free.count(), free.len());
        assert!(group.free.is_merged(), "{:?}", group.free);
    }
    assert_eq!(pool.counts(), counts);
}

/// Returns blocks as an unshared lease does.
fn free(pool: &mut BlockPool, blocks: &GroupBlocks) {
    for (group, ids) in blocks.0.iter().enumerate() {
        assert!(ids.iter().all(|&id| pool.dereference(group, id, false)));
    }
}

/// The last block of each group.
fn last(blocks: &GroupBlocks) -> Vec<Option<BlockId>> {
    blocks.0.iter().map(|ids| ids.last().copied()).collect()
}

fn quarantine(pool: &mut BlockPool, blocks: &GroupBlocks, owner: u64) {
    for (group, ids) in blocks.0.iter().enumerate() {
        ids.iter().for_each(|&id| pool.quarantine(group, id, owner));
    }
}

#[test]
fn allocation_is_all_or_none_over_the_groups() {
    let mut pool = BlockPool::try_new(&[4; 2]).unwrap();
    let first = pool.allocate(&[1, 4], None).unwrap();
    let before = pool.counts();
    assert_eq!(pool.allocate(&[1, 1], None), None);
    assert_eq!(pool.counts(), before);
    assert_eq!((pool.free_of(0), pool.free_of(1)), (3, 0));
    free(&mut pool, &first);
    assert_eq!(pool.counts(), BlockCounts { total: 8, free: 8, ..BlockCounts::default() });
}

#[test]
fn neighbours_go_together() {
    let mut pool = BlockPool::try_new(&[10; 1]).unwrap();
    let mut take = |n: usize| pool.allocate(&[n], None).unwrap();
    let (a, b, c) = (take(3), take(2), take(1));
    assert_eq!((ids(&a), ids(&b), ids(&c)), (vec![vec![0, 1, 2]], vec![vec![3, 4]], vec![vec![5]]));
    free(&mut pool, &a);
    // Four do not fit in front; the run after it fits all of them.
    let d = pool.allocate(&[4], None).unwrap();
    assert_eq!(ids(&d), [[6, 7, 8, 9]]);
    free(&mut pool, &c);
    // A growing table takes the block after its last one although lower ids are free.
    assert_eq!(ids(&pool.allocate(&[1], Some(&last(&b))).unwrap()), [[5]]);
    assert_eq!(ids(&pool.allocate(&[1], Some(&last(&d))).unwrap()), [[0]]);
}

#[test]
#[should_panic(expected = "block 1 is Free, not Referenced")]
fn freeing_twice_panics() {
    let mut pool = BlockPool::try_new(&[2; 1]).unwrap();
    pool.allocate(&[1], None).unwrap();
    pool.dereference(0, BlockId(1), false);
}

#[test]
#[should_panic(expected = "not Quarantined { owner: 8 }")]
fn another_owner_cannot_release() {
    let mut pool = BlockPool::try_new(&[2; 1]).unwrap();
    let blocks = pool.allocate(&[1], None).unwrap();
    quarantine(&mut pool, &blocks, 7);
    assert_eq!((pool.quarantined_by(7), pool.quarantined_by(8)), (1, 0));
    pool.release(&blocks, 8);
}

#[test]
fn a_shared_block_is_free_or_cached_once_the_last_lease_is_gone() {
    let mut pool = BlockPool::try_new(&[2; 1]).unwrap();
    let block = pool.allocate(&[1], None).unwrap().0[0][0];
    pool.reference(0, block);
    assert_eq!((pool.dereference(0, block, true), pool.counts().referenced), (false, 1));
    assert_eq!((pool.dereference(0, block, true), pool.state(0, block)), (true, BlockState::Cached));
    pool.reference(0, block);
    assert_eq!((pool.state(0, block), pool.counts().cached), (BlockState::OWNED, 0));
    pool.dereference(0, block, true);
    assert_eq!(pool.counts(), BlockCounts { total: 2, free: 1, cached: 1, ..BlockCounts::default() });
    pool.evict(0, block);
    assert_eq!(pool.counts(), BlockCounts { total: 2, free: 2, ..BlockCounts::default() });
}

#[test]
#[should_panic(expected = "not Cached")]
fn a_block_in_use_is_not_evicted() {
    let mut pool = BlockPool::try_new(&[2; 1]).unwrap();
    let block = pool.allocate(&[1], None).unwrap().0[0][0];
    pool.evict(0, block);
}

#[test]
#[should_panic(expected = "not one lease's")]
fn a_shared_block_is_not_quarantined() {
    let mut pool = BlockPool::try_new(&[2; 1]).unwrap();
    let block = pool.allocate(&[1], None).unwrap().0[0][0];
    pool.reference(0, block);
    pool.quarantine(0, block, 1);
}

#[test]
fn impossible_pools_are_refused() {
    for (groups, blocks) in [(0, 4), (9, 4), (1, 0)] {
        assert_eq!(
            BlockPool::try_new(&vec![blocks; groups]).unwrap_err(),
            PoolError { groups, blocks: if groups == 0 { 0 } else { blocks } }
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(Vec<usize>),
    Grow(usize, Vec<usize>),
    Free(usize),
    Quarantine(usize, u64),
    Release(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let sizes = || proptest::collection::vec(0usize..6, 3);
    let step = prop_oneof![
        3 => sizes().prop_map(Step::Allocate),
        2 => (any::<usize>(), sizes()).prop_map(|(i, n)| Step::Grow(i, n)),
        3 => any::<usize>().prop_map(Step::Free),
        1 => (any::<usize>(), 0u64..3).prop_map(|(i, owner)| Step::Quarantine(i, owner)),
        1 => any::<usize>().prop_map(Step::Release),
    ];
    proptest::collection::vec(step, 1..120)
}

proptest! {
    #[test]
    fn random_operations_keep_the_books(blocks in proptest::collection::vec(1u32..24, 1..4), steps in steps()) {
        let groups = blocks.len();
        let mut pool = BlockPool::try_new(&blocks).unwrap();
        let (mut held, mut quarantined) = (Vec::<GroupBlocks>::new(), Vec::<(GroupBlocks, u64)>::new());
        for step in steps {
            match step {
                Step::Allocate(n) => {
                    let fits = pool.groups.iter().zip(&n).all(|(g, &n)| g.free.count() >= n);
                    let got = pool.allocate(&n[..groups], None);
                    prop_assert_eq!(got.is_some(), fits);
                    held.extend(got);
                }
                Step::Grow(i, n) if !held.is_empty() => {
                    let i = i % held.len();
                    if let Some(more) = pool.allocate(&n[..groups], Some(&last(&held[i]))) {
                        prop_assert!(more.0.iter().zip(&n).all(|(ids, &n)| ids.len() == n));
                        held[i].0.iter_mut().zip(more.0).for_each(|(have, more)| have.extend(more));
                    }
                }
                Step::Free(i) if !held.is_empty() => free(&mut pool, &held.swap_remove(i % held.len())),
                Step::Quarantine(i, owner) if !held.is_empty() => {
                    let blocks = held.swap_remove(i % held.len());
                    quarantine(&mut pool, &blocks, owner);
                    quarantined.push((blocks, owner));
                }
                Step::Release(i) if !quarantined.is_empty() => {
                    let (blocks, owner) = quarantined.swap_remove(i % quarantined.len());
                    pool.release(&blocks, owner);
                }
                _ => {}
            }
            check_books(&pool);
            // One owner per block: held and quarantined blocks are disjoint, and together they are all blocks that are not free.
            for (g, &blocks) in blocks.iter().enumerate().take(groups) {
                let mut owned: Vec<_> = held.iter().chain(quarantined.iter().map(|(b, _)| b)).flat_map(|b| b.0[g].clone()).collect();
                let n = owned.len();
                owned.sort_unstable();
                owned.dedup();
                prop_assert_eq!(owned.len(), n);
                prop_assert_eq!(pool.groups[g].free.count() + n, blocks as usize);
            }
            for owner in 0..3 {
                let expected: usize = quarantined.iter().filter(|(_, o)| *o == owner).map(|(b, _)| b.total()).sum();
                prop_assert_eq!(pool.quarantined_by(owner), expected);
            }
        }
    }
}
