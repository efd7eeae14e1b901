//! The policies for comparison.

use super::*;

fn decide(
    policy: PlacementPolicy,
    workers: &[Worker],
    prompt_tokens: u64,
    turn: u64,
) -> (usize, Option<usize>, Reason) {
    let thresholds = Thresholds { policy, ..THRESHOLDS };
    let decision =
        place(workers, &Demand { turn, ..demand(Auto, prompt_tokens) }, &thresholds, &mut |n| n - 1).unwrap();
    (decision.decode, decision.prefill, decision.reason)
}

fn cached(mut worker: Worker, tokens: u64) -> Worker {
    worker.cached_tokens = tokens;
    worker
}

#[test]
fn workers_take_turns() {
    let busy = worker(Role::Prefill, "p0", |_, l| (l.waiting, l.waiting_tokens) = (1, 9_000));
    let workers = [d("d0"), d("d1"), busy, p("p1"), cached(p("p2"), 3000)];
    let turns: Vec<_> = (0..6).map(|turn| decide(PlacementPolicy::RoundRobin, &workers, 4000, turn)).collect();
    let expected = [(0, 2), (1, 3), (0, 4), (1, 2), (0, 3), (1, 4)];
    assert_eq!(turns, expected.map(|(d, p)| (d, Some(p), Reason::RemoteLongPrompt)));
    let full = full(Role::Prefill, "p0");
    assert_eq!(decide(PlacementPolicy::RoundRobin, &[d("d0"), full, p("p1")], 4000, 0).1, Some(2), "room comes first");
}

#[test]
fn the_least_loaded_is_taken_whatever_is_cached() {
    let queued = |name, tokens| worker(Role::Prefill, name, |_, l| (l.waiting, l.waiting_tokens) = (1, tokens));
    let workers = [d("d0"), d("d1"), cached(queued("p0", 1000), 3900), queued("p1", 400)];
    assert_eq!(decide(PlacementPolicy::LeastLoaded, &workers, 4000, 0), (1, Some(3), Reason::RemoteLongPrompt));
    let busy = worker(Role::Decode, "d1", |_, l| l.running = 3);
    let workers = [d("d0"), busy, p("p0")];
    assert_eq!(decide(PlacementPolicy::LeastLoaded, &workers, 4000, 0).0, 0);
}

#[test]
fn what_a_worker_happens_to_have_is_used() {
    for policy in PlacementPolicy::ALL {
        let workers = [cached(d("d"), 3800), p("p")];
        assert_eq!(decide(policy, &workers, 4000, 0), (0, None, Reason::LocalShortRest), "{policy}");
        assert_eq!(decide(policy, &[d("d"), p("p")], 200, 0), (0, None, Reason::LocalShortPrompt), "{policy}");
        assert_eq!(decide(policy, &[d("d")], 4000, 0), (0, None, Reason::LocalNoPrefillWorker), "{policy}");
    }
}
