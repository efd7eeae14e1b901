//! A tenant below its share, among requests of others.

use super::*;

const BELOW: Standing = Standing { share: 0.5, is_below: true };
const ABOVE: Standing = Standing { share: 0.5, is_below: false };

fn own(mut worker: Worker, own: Own) -> Worker {
    worker.own = own;
    worker
}

#[test]
fn a_queue_that_others_fill_has_room_within_the_share() {
    let waiting = |role, waiting: u32, own_waiting: u32| {
        own(worker(role, "w", |_, l| l.waiting = waiting), Own { waiting: own_waiting, ..Own::default() })
    };
    // 16 may wait, 8 of them within the share.
    let cases = [
        (Standing::ALONE, 15, 0, true),
        (Standing::ALONE, 16, 0, false),
        (ABOVE, 16, 0, false),
        (BELOW, 16, 0, true),
        (BELOW, 31, 7, true),
        (BELOW, 16, 8, false),
        (BELOW, 15, 8, true),
        (BELOW, 32, 0, false),
        (Standing { share: 0.01, ..BELOW }, 16, 0, true),
        (Standing { share: 0.01, ..BELOW }, 16, 1, false),
    ];
    for (standing, all, its, has_room) in cases {
        let placed = |workers: &[Worker], policy| {
            let demand = Demand { standing, ..demand(policy, 1000) };
            place(workers, &demand, &THRESHOLDS, &mut |_| 0).is_ok()
        };
        let case = format!("{standing:?}, {its} of {all}");
        assert_eq!(placed(&[waiting(Role::Decode, all, its)], Local), has_room, "{case}");
        assert_eq!(placed(&[d("d"), waiting(Role::Prefill, all, its)], Remote), has_room, "{case}");
    }
}

#[test]
fn the_prompt_waits_for_its_tenants_part_of_the_rate_at_most() {
    // (tokens of all, tokens of its own, the time to the first token in seconds)
    let cases = [(100_000, 0, 2.0), (100_000, 1000, 4.0), (3000, 3000, 4.0), (500, 0, 1.5)];
    for (all, its, first_token_s) in cases {
        let queued = worker(Role::Prefill, "p", |_, l| (l.waiting, l.waiting_tokens) = (9, all));
        let queued = own(queued, Own { sequences: 3, waiting: 3, waiting_tokens: its });
        let place = |standing| {
            let time_left = Duration::from_secs(600);
            let demand = Demand { standing, time_left, ..demand(Remote, 1000) };
            let decision = place(&[d("d"), queued.clone()], &demand, &THRESHOLDS, &mut |_| 0).unwrap();
            (decision.predicted.unwrap().first_token, decision.numbers.cost_s)
        };
        assert_eq!(place(BELOW).0, Duration::from_secs_f64(first_token_s), "{all} {its}");
        // Who has more requests than its share, but few tokens, waits no longer.
        assert_eq!(place(ABOVE), place(BELOW));
        let whole_queue = Duration::from_secs_f64((all as f64 + 1000.0) / 1000.0);
        assert_eq!(place(Standing::ALONE).0, whole_queue);
    }
    let flooded = worker(Role::Prefill, "p", |_, l| (l.waiting, l.waiting_tokens) = (9, 100_000));
    let demand = demand(Remote, 1000);
    let refused = check(&[d("d"), flooded.clone()], demand);
    assert!(refused.starts_with("TooLate"), "{refused}");
    assert_eq!(check(&[d("d"), flooded], Demand { standing: BELOW, ..demand }), "d<-p: remote_policy");
}

#[test]
fn the_answer_waits_for_its_tenants_places_at_most() {
    let token = |standing, sequences| {
        let batch = worker(Role::Decode, "d", |r, l| {
            (r.running_max, r.waiting_max, l.running, l.waiting, l.decode_steps_per_s) = (4, 100, 4, 39, 10.0);
        });
        let batch = own(batch, Own { sequences, ..Own::default() });
        let demand = Demand { standing, time_left: Duration::from_secs(3600), ..demand(Remote, 1000) };
        place(&[batch, p("p")], &demand, &THRESHOLDS, &mut |_| 0).unwrap().predicted.unwrap().token
    };
    let steps = |steps: u64| Duration::from_millis(100 * steps);
    assert_eq!((token(Standing::ALONE, 0), token(ABOVE, 43)), (steps(11), steps(11)));
    // Two of the four places are its own.
    assert_eq!([0, 1, 3].map(|sequences| token(BELOW, sequences)), [1, 1, 2].map(steps));
    assert_eq!(token(Standing { share: 0.01, ..BELOW }, 0), steps(1), "one place at least");
}
