mod cached;
mod fair;
mod groups;
mod named;
mod tenants;

use super::*;
use crate::testing::record;
use PrefillPolicy::{Auto, Local, Remote};
use baton_types::Role;
use std::sync::Arc;

const THRESHOLDS: Thresholds = Thresholds {
    local_prefill_tokens_max: 256,
    prefill_tokens_per_s_default: 1000.0,
    policy: PlacementPolicy::Cost,
    prefill_doubles_at_tokens: 0.0,
    transfer_bytes_per_s: 0.0,
    gets: true,
};

fn worker(role: Role, name: &str, change: impl FnOnce(&mut baton_types::InstanceRecord, &mut Measured)) -> Worker {
    let mut record = record(role, name);
    let mut load =
        Measured { free_tokens: record.capacity_tokens, prefill_tokens_per_s: 1000.0, ..Measured::default() };
    change(&mut record, &mut load);
    Worker { record: Arc::new(record), group: None, load, own: Own::default(), not_with: Vec::new(), cached_tokens: 0 }
}

fn d(name: &str) -> Worker {
    worker(Role::Decode, name, |_, _| ())
}

fn p(name: &str) -> Worker {
    worker(Role::Prefill, name, |_, _| ())
}

fn full(role: Role, name: &str) -> Worker {
    worker(role, name, |r, l| l.waiting = r.waiting_max)
}

fn demand(policy: PrefillPolicy, prompt_tokens: u64) -> Demand {
    let (total_tokens, time_left) = (prompt_tokens + 100, Duration::from_secs(60));
    let (slowness, longest, standing) = (Slowness::default(), Duration::ZERO, Standing::ALONE);
    Demand { prompt_tokens, total_tokens, answer_tokens: 41, policy, time_left, slowness, longest, standing, turn: 0 }
}

/// `decode<-prefill: reason`, or the refusal.
fn check(workers: &[Worker], demand: Demand) -> String {
    match place(workers, &demand, &THRESHOLDS, &mut |_| 0) {
        Ok(decision) => {
            let name = |w: usize| workers[w].record.party.instance.as_str().to_owned();
            let prefill = decision.prefill.map_or("local".to_owned(), name);
            format!("{}<-{prefill}: {}", name(decision.decode), decision.reason.name())
        }
        Err(refusal) => format!("{refusal:?}"),
    }
}

#[test]
fn a_worker_with_a_little_room_beside_its_quarantine_comes_before_one_with_none() {
    let left = |free_tokens| {
        move |_: &mut baton_types::InstanceRecord, l: &mut Measured| {
            (l.free_tokens, l.waives_margin) = (free_tokens, true);
        }
    };
    let workers = [worker(Role::Decode, "none", left(0)), worker(Role::Decode, "little", left(16))];
    assert_eq!(check(&workers, demand(Local, 10)), "little<-local: local_policy");
    assert_eq!(check(&workers, demand(Local, 16)), "none<-local: local_policy", "neither has room");
}

#[test]
fn policies() {
    let busy = worker(Role::Decode, "busy", |_, l| l.running = 4);
    let waiting = worker(Role::Decode, "waiting", |_, l| l.waiting = 1);
    let queued = worker(Role::Prefill, "queued", |_, l| (l.waiting, l.waiting_tokens) = (1, 5000));
    let cases: Vec<(Vec<Worker>, Demand, &str)> = vec![
        (vec![d("d"), p("p")], demand(Auto, 256), "d<-local: local_short_prompt"),
        (vec![busy.clone(), p("p")], demand(Auto, 256), "busy<-p: remote_short_prompt"),
        (vec![busy.clone(), d("d"), p("p")], demand(Auto, 256), "d<-local: local_short_prompt"),
        (vec![busy.clone(), queued], demand(Auto, 256), "busy<-local: local_short_prompt"),
        (vec![waiting, p("p")], demand(Auto, 256), "waiting<-p: remote_short_prompt"),
        (vec![busy], demand(Auto, 256), "busy<-local: local_no_prefill_worker"),
        (vec![d("d"), p("p")], demand(Auto, 257), "d<-p: remote_long_prompt"),
        (vec![d("d"), p("p")], demand(Remote, 1), "d<-p: remote_policy"),
        (vec![d("d"), p("p")], demand(Local, 3000), "d<-local: local_policy"),
        (vec![d("d")], demand(Auto, 3000), "d<-local: local_no_prefill_worker"),
        (vec![d("d")], demand(Remote, 10), "NoPrefillWorker"),
        (vec![d("d"), full(Role::Prefill, "p")], demand(Auto, 3000), "d<-local: local_prefill_full"),
        (vec![d("d"), full(Role::Prefill, "p")], demand(Remote, 3000), "Full { retry_after: 3s }"),
        (vec![p("p")], demand(Auto, 10), "NoDecodeWorker"),
        (vec![], demand(Auto, 10), "NoDecodeWorker"),
        (vec![full(Role::Decode, "d"), p("p")], demand(Auto, 10), "Full { retry_after: 1s }"),
        (vec![d("d")], demand(Auto, 100_000), "NeverFits { tokens_max: 8192 }"),
    ];
    for (workers, demand, expected) in cases {
        assert_eq!(check(&workers, demand), expected, "{demand:?}");
    }
}

#[test]
fn a_short_prompt_that_delays_answers_is_sent_although_its_kv_is_moved() {
    let thresholds = Thresholds { transfer_bytes_per_s: 1e6, ..THRESHOLDS };
    let d = worker(Role::Decode, "d", |_, l| l.running = 4);
    let decision = place(&[d, p("p")], &demand(Auto, 256), &thresholds, &mut |_| 0).unwrap();
    assert!(decision.prefill.is_some() && decision.numbers.cost_s > 0.52, "{decision:?}");
}

#[test]
fn what_a_local_prefill_costs_running_answers_is_no_part_of_its_own_time() {
    let of = |running| {
        let d = worker(Role::Decode, "d", |_, l| l.running = running);
        place(&[d], &demand(Local, 256), &THRESHOLDS, &mut |_| 0).unwrap()
    };
    let (idle, busy) = (of(0), of(4));
    assert_eq!(busy.predicted.unwrap().first_token, idle.predicted.unwrap().first_token);
    assert!(busy.numbers.cost_s > idle.numbers.cost_s + 1.0, "{busy:?}");
}

#[test]
fn the_cheapest_is_chosen() {
    let busy_d = worker(Role::Decode, "busy", |_, l| l.running = 8);
    let no_room = worker(Role::Decode, "no-room", |_, l| l.free_tokens = 100);
    let queued_p = worker(Role::Prefill, "queued", |_, l| (l.waiting, l.waiting_tokens) = (1, 5000));
    let fast_p = worker(Role::Prefill, "fast", |_, l| {
        (l.waiting, l.waiting_tokens, l.prefill_tokens_per_s) = (1, 5000, 100_000.0);
    });
    let unmeasured = worker(Role::Prefill, "unmeasured", |_, l| l.prefill_tokens_per_s = 0.0);
    let slow = worker(Role::Prefill, "slow", |_, l| l.prefill_tokens_per_s = 100.0);
    let slow_once =
        worker(Role::Prefill, "slow-once", |_, l| (l.prefill_tokens_per_s, l.rates_are_old) = (100.0, true));
    let small_p = worker(Role::Prefill, "small", |r, _| r.capacity_tokens = 512);
    let prefilling_d = worker(Role::Decode, "prefilling", |_, l| l.waiting_tokens = 20_000);
    let cases: Vec<(Vec<Worker>, Demand, &str)> = vec![
        (vec![busy_d.clone(), d("idle"), p("p")], demand(Auto, 1000), "idle<-p: remote_long_prompt"),
        (vec![no_room.clone(), busy_d.clone(), p("p")], demand(Auto, 1000), "busy<-p: remote_long_prompt"),
        (vec![no_room, p("p")], demand(Auto, 1000), "no-room<-p: remote_long_prompt"),
        (vec![d("d"), queued_p.clone(), p("p")], demand(Auto, 1000), "d<-p: remote_long_prompt"),
        (vec![d("d"), queued_p.clone(), fast_p], demand(Auto, 1000), "d<-fast: remote_long_prompt"),
        (vec![d("d"), queued_p, unmeasured], demand(Auto, 1000), "d<-unmeasured: remote_long_prompt"),
        (vec![d("d"), slow, p("p")], demand(Auto, 1000), "d<-p: remote_long_prompt"),
        (vec![d("d"), slow_once.clone(), p("p")], demand(Auto, 1000), "d<-slow-once: remote_long_prompt"),
        (vec![d("d"), slow_once, p("p")], demand(Auto, 8000), "d<-slow-once: remote_long_prompt"),
        (vec![d("d"), small_p], demand(Auto, 1000), "d<-local: local_no_prefill_worker"),
        (vec![prefilling_d, d("d")], demand(Local, 1000), "d<-local: local_policy"),
    ];
    for (workers, demand, expected) in cases {
        assert_eq!(check(&workers, demand), expected, "{demand:?}");
    }
}

#[test]
fn nobody_is_given_what_it_would_end_early() {
    let context = |role, name, tokens| worker(role, name, |r, _| r.card.context_max = tokens);
    let d_of = |name, tokens| context(Role::Decode, name, tokens);
    let p_of = |name, tokens| context(Role::Prefill, name, tokens);
    let small_pool = worker(Role::Decode, "pool", |r, _| r.capacity_tokens = 1000);
    let last = Demand { total_tokens: 401, ..demand(Remote, 400) };
    let cases: Vec<(Vec<Worker>, Demand, &str)> = vec![
        (vec![d_of("small", 499), d("d")], demand(Local, 400), "d<-local: local_policy"),
        (vec![d_of("just", 500), d("d")], demand(Local, 400), "just<-local: local_policy"),
        (vec![d_of("small", 499), small_pool], demand(Local, 901), "NeverFits { tokens_max: 1000 }"),
        (vec![d("d"), p_of("small", 256)], demand(Auto, 400), "d<-local: local_no_prefill_worker"),
        (vec![d("d"), p_of("small", 256), p("p")], demand(Auto, 400), "d<-p: remote_long_prompt"),
        (vec![d("d"), p_of("just", 402)], demand(Remote, 400), "d<-just: remote_policy"),
        // It would say that the answer ends with the first token.
        (
            vec![d("d"), p_of("small", 401)],
            demand(Remote, 400),
            "NeverPrefilled { prompt_tokens: 400, prompt_tokens_max: 399 }",
        ),
        (vec![d("d"), p_of("just", 401)], last, "d<-just: remote_policy"),
        (vec![d("d"), p_of("small", 400)], last, "NeverPrefilled { prompt_tokens: 400, prompt_tokens_max: 399 }"),
    ];
    for (workers, demand, expected) in cases {
        assert_eq!(check(&workers, demand), expected, "{demand:?}");
    }
}

#[test]
fn only_compatible_workers_are_paired() {
    let differs: [fn(&mut baton_types::InstanceRecord); 4] = [
        |r| r.card.fingerprint = baton_types::Digest([9; 32]),
        |r| r.class.kernel_revision += 1,
        |r| r.layout = crate::testing::layout(16, 3),
        |r| (r.protocol.min, r.protocol.max) = (7, 9),
    ];
    // The hazard: the same view with a worker whose record does not show the difference.
    assert_eq!(check(&[d("d"), p("odd")], demand(Auto, 1000)), "d<-odd: remote_long_prompt");
    for differ in differs {
        let odd = worker(Role::Prefill, "odd", |r, _| differ(r));
        let idle = worker(Role::Decode, "idle", |r, _| differ(r));
        let busy = worker(Role::Decode, "busy", |_, l| l.running = 8);
        assert_eq!(check(&[d("d"), odd.clone()], demand(Auto, 1000)), "d<-local: local_no_prefill_worker");
        assert_eq!(check(&[d("d"), odd.clone(), p("p")], demand(Auto, 1000)), "d<-p: remote_long_prompt");
        assert_eq!(check(&[busy, idle, p("p")], demand(Auto, 1000)), "busy<-p: remote_long_prompt");
    }
    let blocks = worker(Role::Prefill, "other-blocks", |r, _| r.layout = crate::testing::layout(64, 2));
    assert_eq!(check(&[d("d"), blocks], demand(Auto, 1000)), "d<-other-blocks: remote_long_prompt");
}

#[test]
fn a_predicted_miss_of_the_deadline_is_refused() {
    let slow = worker(Role::Prefill, "slow", |_, l| (l.waiting, l.waiting_tokens) = (1, 9000));
    let mut demand = demand(Remote, 1000);
    assert_eq!(check(&[d("d"), slow.clone()], demand), "d<-slow: remote_policy");
    demand.time_left = Duration::from_secs(13);
    assert_eq!(
        check(&[d("d"), slow], demand),
        "TooLate { first_token: 13.333333333s, end: 13.333333333s }",
        "10 s, and a third where others are ahead"
    );
    let unmeasured = worker(Role::Prefill, "p", |_, l| (l.waiting_tokens, l.prefill_tokens_per_s) = (9000, 0.0));
    assert_eq!(check(&[d("d"), unmeasured], demand), "d<-p: remote_policy", "what is not measured refuses nobody");
    // Ten steps a second: 40 more tokens in 4 s, after a first one in 1 s.
    let steps = |running: u32, waiting: u32| {
        worker(Role::Decode, "d", |r, l| {
            (r.running_max, l.running, l.waiting, l.decode_steps_per_s) = (4, running, waiting, 10.0);
        })
    };
    demand.time_left = Duration::from_millis(6_667);
    assert_eq!(check(&[steps(3, 0), p("p")], demand), "d<-p: remote_policy");
    let two_go_before_it = "TooLate { first_token: 1.333333333s, end: 9.333333333s }";
    assert_eq!(check(&[steps(4, 1), p("p")], demand), two_go_before_it);
    demand.slowness = Slowness::always(1.5);
    let answers_took_longer_so_far = "TooLate { first_token: 2s, end: 10s }";
    assert_eq!(check(&[steps(3, 0), p("p")], demand), answers_took_longer_so_far);
    demand.slowness = Slowness::default();
    demand.time_left = Duration::from_millis(6_666);
    assert_eq!(check(&[steps(3, 0), p("p")], demand), "TooLate { first_token: 1.333333333s, end: 6.666666667s }");
    demand.time_left = Duration::from_secs(5);
    assert_eq!(check(&[steps(0, 0), p("p")], demand), "d<-p: remote_policy", "nobody is ahead");
    demand.time_left = Duration::from_millis(4_999);
    assert_eq!(check(&[steps(0, 0), p("p")], demand), "Impossible { first_token: 1s, end: 5s }");
    assert_eq!(check(&[steps(3, 0), p("p")], demand), "Impossible { first_token: 1s, end: 5s }", "whoever is ahead");
    // Others disturb it now: a while ago it was fast enough.
    let mut disturbed = steps(0, 0);
    disturbed.load.best.decode_steps_per_s = 100.0;
    assert!(check(&[disturbed, p("p")], demand).starts_with("TooLate"));
    let quick = worker(Role::Prefill, "quick", |_, l| (l.prefill_tokens_per_s, l.waiting_tokens) = (2000.0, 90_000));
    let others_may_be_done = "TooLate { first_token: 1s, end: 5s }";
    assert_eq!(check(&[steps(0, 0), p("p"), quick], demand), others_may_be_done, "the quick one is busy");
    let old = |mut worker: Worker| {
        worker.load.rates_are_old = true;
        worker
    };
    demand.time_left = Duration::from_millis(999);
    demand.slowness = Slowness::always(16.0);
    assert_eq!(check(&[old(steps(0, 0)), p("p")], demand), "TooLate { first_token: 16s, end: 16s }");
    assert_eq!(check(&[steps(0, 0), old(p("p"))], demand), "Impossible { first_token: 0ns, end: 4s }");
    let idle = [old(steps(0, 0)), old(p("p"))];
    assert_eq!(check(&idle, demand), "d<-p: remote_policy", "only a request can show what they take now");
}

#[test]
fn ties_are_drawn() {
    let workers = [d("d0"), d("d1"), p("p0"), p("p1"), p("p2")];
    let mut asked = Vec::new();
    let decision = place(&workers, &demand(Remote, 500), &THRESHOLDS, &mut |n| {
        asked.push(n);
        n - 1
    });
    assert_eq!(asked, [2, 3]);
    assert_eq!(decision.map(|d| (d.decode, d.prefill)), Ok((1, Some(4))));
}
