use super::*;
use crate::bench::report::{About, Report, Slo};
use baton_router::PlacementPolicy;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::time::Duration;

/// With room for this many blocks of the trace in each pool.
fn fleet(policy: PlacementPolicy, blocks: u32) -> Fleet {
    Fleet {
        rates: Arc::new(rates::read(None).unwrap()),
        policy,
        prefill: 4,
        decode: 3,
        block_tokens: 128,
        prefill_blocks: 4 * blocks,
        decode_blocks: 4 * blocks,
        len_max: 200_000,
        ttl: None,
        gets: true,
        seed: 7,
    }
}

fn simulate(fleet: &Fleet, trace: &Trace) -> Simulated {
    Traffic::new(trace.clone(), 1).simulate(fleet).unwrap()
}

fn request(at_s: f64, prompt_tokens: u32, output_tokens: u32, blocks: Vec<u64>) -> TraceRequest {
    TraceRequest { at: Duration::from_secs_f64(at_s), prompt_tokens, output_tokens, blocks }
}

fn trace(requests: Vec<TraceRequest>) -> Trace {
    let mut trace = Trace { requests, block_tokens: 512, sharing_known: true };
    trace.in_order();
    trace
}

/// 60 conversations of 6 turns; each 20 of them share a system prompt of 3 blocks, and a turn adds 4 blocks to the one before it.
fn conversations() -> Trace {
    let mut random = StdRng::seed_from_u64(11);
    let mut requests = Vec::new();
    for conversation in 0..60 {
        let mut at_s = random.random_range(0.0..120.0);
        let mut blocks: Vec<u64> = (0..3).map(|block| conversation % 3 * 3 + block).collect();
        for turn in 0..6 {
            blocks.extend((0..4).map(|block| 1_000 + conversation * 100 + turn * 4 + block));
            let prompt_tokens = 512 * blocks.len() as u32 - random.random_range(0..512);
            requests.push(request(at_s, prompt_tokens, random.random_range(1..300), blocks.clone()));
            at_s += random.random_range(8.0..30.0);
        }
    }
    trace(requests)
}

fn report(fleet: &Fleet, trace: &Trace) -> Report {
    let told = simulate(fleet, trace);
    assert!(told.outcomes.iter().all(|outcome| outcome.result == Ending::Ok), "{:?}", told.outcomes[0]);
    Report::of(About::default(), &told.outcomes, Slo::default())
}

#[test]
fn cost_hits_more_and_answers_sooner_than_turns_do() {
    let trace = conversations();
    // Room for everything, and for a fraction of it.
    for blocks in [4_000, 150] {
        let of = |policy| report(&fleet(policy, blocks), &trace);
        let (cost, turns) = (of(PlacementPolicy::Cost), of(PlacementPolicy::RoundRobin));
        let (hits, blind_hits) = (cost.cache.of_infinite.unwrap(), turns.cache.of_infinite.unwrap());
        assert!(hits > 1.4 * blind_hits, "{blocks} blocks: {hits} to {blind_hits}");
        assert!(cost.ttft_ms.mean < 0.7 * turns.ttft_ms.mean, "{:?} to {:?}", cost.ttft_ms, turns.ttft_ms);
        assert!(cost.ttft_ms.p95 < 0.9 * turns.ttft_ms.p95, "{:?} to {:?}", cost.ttft_ms, turns.ttft_ms);
        assert!(hits <= 1.0, "nothing hits more than an infinite cache");
    }
    assert!(report(&fleet(PlacementPolicy::Cost, 4_000), &trace).cache.of_infinite.unwrap() > 0.9);
}

#[test]
fn requests_that_come_together_follow_the_first_one() {
    // A new prefix of 6 blocks, and one private block each. No worker reports anything before the last one is placed.
    let asked = |own: u64| request(1.0, 3_600, 2, (0..6).chain([100 + own]).collect());
    let trace = trace((0..5).map(asked).collect());
    let told = simulate(&fleet(PlacementPolicy::Cost, 500), &trace);
    let cached: Vec<u32> = told.outcomes.iter().map(|outcome| outcome.cached_tokens).collect();
    assert_eq!(cached, [0, 6 * 512, 6 * 512, 6 * 512, 6 * 512]);
    let blind = simulate(&fleet(PlacementPolicy::LeastLoaded, 500), &trace);
    assert!(blind.outcomes.iter().filter(|outcome| outcome.cached_tokens == 0).count() >= 4, "on each worker anew");
}

#[test]
fn the_same_seed_gives_the_same_times() {
    let trace = conversations();
    let of = |seed| report(&Fleet { seed, ..fleet(PlacementPolicy::Cost, 150) }, &trace);
    let (first, again, other) = (of(1), of(1), of(2));
    assert_eq!(first, again);
    assert_ne!(first.ttft_ms, other.ttft_ms, "ties are drawn");
}

#[test]
fn one_request_takes_what_the_rates_say() {
    let trace = trace(vec![request(0.0, 5_000, 4, (0..10).collect()), request(60.0, 5_000, 1, (0..10).collect())]);
    let one = Fleet { prefill: 1, decode: 1, gets: false, ..fleet(PlacementPolicy::RoundRobin, 100) };
    let rates = one.rates.clone();
    let told = simulate(&one, &trace).outcomes;
    // Each step is rounded to microseconds, and the next one begins a microsecond later.
    let near = |got: f64, wanted: f64| assert!((got - wanted).abs() < 1e-5, "{got} s, not {wanted}");
    // The claim is opened and confirmed before the prompt is sent: a round trip and a half, and one for the prompt.
    let calls_s = 2.5 * rates.router.round_trip_s;
    let first = calls_s + rates.prefill.prompt_s + rates.compute_s(0, 5_000);
    near(told[0].ttft.unwrap().as_secs_f64(), first);
    let gaps: Vec<f64> = told[0].gaps_us.iter().map(|us| f64::from(*us) / 1e6).collect();
    // Of the last chunk, all but the last of four layers were sent while layers were computed.
    let last_layer = rates.moved_s(5_000 - 2 * 2_048) / 4.0;
    let handoff = gaps[0] - rates.step_s(1, 5_000);
    assert!((last_layer..last_layer + 2.0 * rates.transfer.latency_s).contains(&handoff), "{handoff} s");
    near(gaps[1], rates.step_s(1, 5_001));
    assert_eq!((told[0].output_tokens, gaps.len()), (4, 3));
    // The block of the last token is computed again on the decode worker: the get takes one round trip.
    assert_eq!(told[1].placement.as_deref(), Some("local_short_rest"));
    assert_eq!((told[1].cached_tokens, told[1].output_tokens), (39 * 128, 1));
    let rest = rates.router.round_trip_s + rates.prefill.prompt_s + rates.compute_s(39 * 128, 5_000);
    near(told[1].ttft.unwrap().as_secs_f64(), rest);
}

#[test]
fn what_only_the_decode_worker_has_is_read_from_there() {
    // The prefill worker has room for only one prompt: the second evicts the first, whose first half is then used again.
    let asked = |at_s, first: u64| request(at_s, 20_480, 40, (first..first + 40).collect());
    let half = request(40.0, 20_480, 40, (0..20).chain(200..220).collect());
    let trace = trace(vec![asked(0.0, 0), asked(20.0, 100), half]);
    let small = Fleet {
        prefill: 1,
        decode: 1,
        prefill_blocks: 4 * 45,
        decode_blocks: 4 * 1_000,
        ..fleet(PlacementPolicy::Cost, 0)
    };
    let told = simulate(&small, &trace);
    assert_eq!(told.outcomes[2].placement.as_deref(), Some("local_cached"), "an idle decode worker needs nobody");
    let busy = trace_with(&trace, request(30.0, 20_480, 2_000, (900..940).collect()));
    let told = simulate(&small, &busy);
    let back = told.outcomes.iter().rposition(|outcome| outcome.at == Duration::from_secs(40)).unwrap();
    assert_eq!(told.outcomes[back].placement.as_deref(), Some("remote_get"));
    assert_eq!((told.got_tokens, told.outcomes[back].cached_tokens), (20 * 512, 20 * 512));
    let never = Fleet { gets: false, ..small };
    assert_eq!(simulate(&never, &busy).got_tokens, 0);
}

fn trace_with(before: &Trace, more: TraceRequest) -> Trace {
    trace(before.requests.iter().cloned().chain([more]).collect())
}

#[test]
fn a_prompt_that_fits_nowhere_fails_alone() {
    let long = request(1.0, 512 * 200, 10, (0..200).collect());
    let trace = trace(vec![long, request(2.0, 700, 10, vec![7, 8])]);
    let told = simulate(&fleet(PlacementPolicy::Cost, 150), &trace);
    assert_eq!(told.outcomes[0].result, Ending::Failed("context_length_exceeded".into()));
    assert_eq!(told.outcomes[1].result, Ending::Ok);
}
