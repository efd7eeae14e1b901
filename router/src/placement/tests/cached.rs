//! Effects of cached prefixes on placement.

use super::*;
use crate::placement::cost::work_tokens;

/// 1 s for 1,000 tokens of prompt; 2 KiB of KV a token in the records of tests, so that 1,000 tokens move in about `1 / 10` s here.
fn thresholds() -> Thresholds {
    let record = record(Role::Decode, "any");
    Thresholds { transfer_bytes_per_s: 10_000.0 * record.layout.bytes_per_token() as f64, ..THRESHOLDS }
}

fn has(mut worker: Worker, cached_tokens: u64) -> Worker {
    worker.cached_tokens = cached_tokens;
    worker
}

fn queue(mut worker: Worker, waiting_tokens: u64) -> Worker {
    (worker.load.waiting, worker.load.waiting_tokens) = (1, waiting_tokens);
    worker
}

fn decide(workers: &[Worker], demand: &Demand, thresholds: &Thresholds) -> Decision {
    place(workers, demand, thresholds, &mut |_| 0).unwrap()
}

/// `decode<-prefill: reason`, and `get` where there is one.
fn told(workers: &[Worker], prompt_tokens: u64, thresholds: &Thresholds) -> String {
    let decision = decide(workers, &demand(Auto, prompt_tokens), thresholds);
    let name = |w: usize| workers[w].record.party.instance.as_str();
    let get = if decision.get_to_tokens > 0 { format!(" get {}", decision.get_to_tokens) } else { String::new() };
    let prefill = decision.prefill.map_or("local", name);
    format!("{}<-{prefill}: {}{get}", name(decision.decode), decision.reason.name())
}

#[test]
fn a_prefix_is_used_where_it_is_unless_the_queue_there_costs_more() {
    let cases: Vec<(Vec<Worker>, &str)> = vec![
        (vec![d("d"), p("p0"), p("p1")], "d<-p0: remote_long_prompt"),
        (vec![d("d"), p("p0"), has(p("p1"), 3000)], "d<-p1: remote_cached"),
        (vec![d("d"), has(p("p0"), 1000), has(p("p1"), 3000)], "d<-p1: remote_cached"),
        // 3,000 tokens save 3 s here and 3 s for requests behind it.
        (vec![d("d"), p("p0"), queue(has(p("p1"), 3000), 5000)], "d<-p1: remote_cached"),
        (vec![d("d"), p("p0"), queue(has(p("p1"), 3000), 7000)], "d<-p0: remote_replicated"),
    ];
    for (workers, expected) in cases {
        assert_eq!(told(&workers, 4000, &thresholds()), expected);
    }
}

#[test]
fn what_only_the_decode_worker_has_is_got_or_gone_on_with_there() {
    let held = |tokens| has(d("d"), tokens);
    let busy = |tokens| worker(Role::Decode, "d", |_, l| l.running = 3).with(tokens);
    let measures = |role, name, rate, is_old| {
        worker(role, name, |_, l| (l.prefill_tokens_per_s, l.rates_are_old) = (rate, is_old))
    };
    let unmeasured = || measures(Role::Decode, "d", 0.0, false);
    let slow_once = || measures(Role::Decode, "d", 1000.0, true);
    let fast = || measures(Role::Prefill, "p", 10_000.0, false);
    let slow = Thresholds { transfer_bytes_per_s: thresholds().transfer_bytes_per_s / 100.0, ..thresholds() };
    let never = Thresholds { gets: false, ..thresholds() };
    let cases: Vec<(Vec<Worker>, Thresholds, &str)> = vec![
        // 3,000 tokens are read in 0.3 s and computed in 3.
        (vec![busy(3000), p("p")], thresholds(), "d<-p: remote_get get 3000"),
        (vec![busy(3000), has(p("p"), 1000)], thresholds(), "d<-p: remote_get get 3000"),
        (vec![busy(3000), has(p("p"), 3000)], thresholds(), "d<-p: remote_cached"),
        (vec![busy(3000), has(p("p"), 3500)], thresholds(), "d<-p: remote_cached"),
        // No get is worth 30 s, and none is possible where workers cannot.
        (vec![busy(3000), p("p")], slow, "d<-local: local_cached"),
        (vec![held(3000), p("p")], never, "d<-local: local_cached"),
        // The rest delays every answer of the batch.
        (vec![worker(Role::Decode, "d", |_, l| l.running = 9).with(3000), p("p")], never, "d<-p: remote_long_prompt"),
        // The decode worker has no more cached than a prefill worker: then a prefill worker prefills.
        (vec![held(3000), has(p("p"), 3000)], never, "d<-p: remote_cached"),
        // An idle one need not transfer anything.
        (vec![held(3000), p("p")], thresholds(), "d<-local: local_cached"),
        (vec![held(3800), p("p")], thresholds(), "d<-local: local_short_rest"),
        (vec![queue(held(3800), 90_000), p("p")], thresholds(), "d<-p: remote_get get 3800"),
        // One that has measured nothing may be as fast as any: else it would never compute a prompt, and measure nothing.
        (vec![has(unmeasured(), 3800), has(fast(), 3800)], thresholds(), "d<-local: local_short_rest"),
        (vec![has(slow_once(), 3800), has(fast(), 3800)], thresholds(), "d<-local: local_short_rest"),
        (vec![held(3800), has(fast(), 3800)], thresholds(), "d<-p: remote_cached"),
    ];
    for (i, (workers, thresholds, expected)) in cases.into_iter().enumerate() {
        assert_eq!(told(&workers, 4000, &thresholds), expected, "case {i}");
    }
}

trait With {
    fn with(self, cached_tokens: u64) -> Self;
}

impl With for Worker {
    fn with(self, cached_tokens: u64) -> Self {
        has(self, cached_tokens)
    }
}

#[test]
fn the_decode_worker_that_need_not_be_sent_everything_is_preferred() {
    let slow =
        Thresholds { transfer_bytes_per_s: thresholds().transfer_bytes_per_s / 20.0, gets: false, ..thresholds() };
    let workers =
        |cached| vec![d("d0"), worker(Role::Decode, "d1", |_, l| l.running = 1).with(cached), has(p("p"), 4000)];
    assert_eq!(told(&workers(0), 4001, &slow), "d0<-p: remote_cached", "d1 is fuller");
    // 8 s to move what the prefill worker has at once, 2 s of that in d1's case.
    assert_eq!(told(&workers(3000), 4001, &slow), "d1<-p: remote_cached");
    let fewer_steps = |rate| move |_: &mut baton_types::InstanceRecord, l: &mut Measured| l.decode_steps_per_s = rate;
    let by_steps =
        vec![worker(Role::Decode, "d0", fewer_steps(20.0)), worker(Role::Decode, "d1", fewer_steps(50.0)), p("p")];
    assert_eq!(told(&by_steps, 4000, &slow), "d1<-p: remote_long_prompt", "later tokens count");
}

#[test]
fn tokens_far_into_a_prompt_take_longer() {
    assert_eq!(work_tokens(0, 1000, 0.0), 1000.0);
    assert_eq!(work_tokens(0, 1000, 1000.0), 1500.0, "from once to twice the time");
    assert_eq!(work_tokens(1000, 2000, 1000.0), 2500.0);
    assert_eq!(work_tokens(7, 7, 1000.0), 0.0);
    let bent = Thresholds { prefill_doubles_at_tokens: 1000.0, ..thresholds() };
    let decision = decide(&[d("d"), has(p("p"), 1000)], &demand(Auto, 2000), &bent);
    assert_eq!(decision.work_tokens, 2500);
    assert_eq!(decision.predicted.unwrap().first_token, Duration::from_millis(2500));
}

#[test]
fn the_last_token_is_computed_whatever_is_cached() {
    let decision = decide(&[d("d"), has(p("p"), 9999)], &demand(Remote, 2000), &thresholds());
    assert_eq!((decision.work_tokens, decision.numbers.prefill_cached_tokens), (1, 1999));
}

#[test]
fn decisions_explain_themselves() {
    let workers = [d("d"), p("p0"), queue(has(p("p1"), 3000), 500)];
    let decision = decide(&workers, &demand(Auto, 4000), &THRESHOLDS);
    let Numbers { prefill_cached_tokens, decode_cached_tokens, cost_s, runner_up_s } = decision.numbers;
    assert_eq!((decision.reason, prefill_cached_tokens, decode_cached_tokens), (Reason::RemoteCached, 3000, 0));
    assert!((cost_s - 2.5).abs() < 1e-9, "half a second of queue, and one of compute, twice: {cost_s}");
    assert!((runner_up_s.unwrap() - 8.0).abs() < 1e-9, "{runner_up_s:?}");
    assert_eq!(decide(&workers[..2], &demand(Auto, 4000), &THRESHOLDS).numbers.runner_up_s, None);
}

#[test]
fn a_hot_prefix_spreads_with_what_is_placed() {
    // 120 concurrent requests of 3,100 tokens, of which 3,000 are the same and cached on one of three workers.
    let mut workers = vec![d("d"), has(p("p0"), 3000), p("p1"), p("p2")];
    workers[0].record =
        Arc::new(baton_types::InstanceRecord { running_max: 1000, waiting_max: 1000, ..(*workers[0].record).clone() });
    let mut placed = [0; 4];
    for _ in 0..120 {
        let decision = decide(&workers, &demand(Remote, 3100), &thresholds());
        let p = decision.prefill.unwrap();
        placed[p] += 1;
        workers[p].load.waiting_tokens += decision.work_tokens;
        workers[p].cached_tokens = 3000;
    }
    assert!(placed[1..].iter().all(|n| *n >= 10), "{placed:?}");
    assert!(placed[1] >= 60, "those who have it already are not passed over: {placed:?}");
}
