//! Grouping workers that pair alike only spares work.

use super::*;
use crate::placement::pair_alike;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

fn any(role: Role, number: usize, random: &mut StdRng) -> Worker {
    let revision = random.random_range(1..3);
    let mut worker = worker(role, &format!("{}{number}", role.name()), |record, load| {
        record.class.kernel_revision = revision;
        load.waiting = if random.random_bool(0.2) { record.waiting_max } else { random.random_range(0..4) };
        load.waiting_tokens = random.random_range(0..3) * 1000;
        load.running = random.random_range(0..4);
        load.prefill_tokens_per_s = f64::from(random.random_range(0..4)) * 500.0;
        load.decode_steps_per_s = f64::from(random.random_range(0..4)) * 10.0;
    });
    worker.cached_tokens = random.random_range(0..5) * 300;
    worker
}

#[test]
fn groups_change_no_decision() {
    let mut random = StdRng::seed_from_u64(7);
    let mut reasons = std::collections::BTreeSet::new();
    for round in 0..4_000 {
        let roles = [Role::Prefill, Role::Decode].into_iter().flat_map(|role| (0..5).map(move |number| (role, number)));
        let mut alone: Vec<Worker> = roles.map(|(role, number)| any(role, number, &mut random)).collect();
        let some = alone[random.random_range(5..10)].record.party.clone();
        if random.random_bool(0.3) {
            alone[random.random_range(0..5)].not_with.push(some);
        }
        let mut grouped = alone.clone();
        for w in 0..grouped.len() {
            let like = (0..=w).find(|&other| pair_alike(&alone[other].record, &alone[w].record));
            grouped[w].group = like.map(|like| like as u32);
        }
        let policy = [Auto, Remote][round % 2];
        let thresholds = Thresholds { policy: PlacementPolicy::ALL[round % 3], ..THRESHOLDS };
        let decide = |workers: &[Worker]| {
            let mut draws = StdRng::seed_from_u64(round as u64);
            place(workers, &demand(policy, 1500), &thresholds, &mut |n| draws.random_range(0..n))
        };
        let decision = decide(&alone);
        assert_eq!(decide(&grouped), decision, "round {round}");
        reasons.insert(decision.map_or_else(|refusal| format!("{:?}", refusal.kind()), |d| d.reason.name().into()));
    }
    assert!(reasons.len() >= 6, "of many kinds: {reasons:?}");
}
