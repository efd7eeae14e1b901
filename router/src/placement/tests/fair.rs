//! A full cluster, in virtual time: the length of the prompt does not decide which requests are answered.

use super::super::longest::Longest;
use super::*;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::collections::VecDeque;

/// Prompts of 64 to 512 tokens, as the benchmark's, computed one after the other at 1,000 a second.
const PROMPT: std::ops::RangeInclusive<u64> = 64..=512;
const RATE: f64 = 1000.0;
const TIME: Duration = Duration::from_secs(2);
/// Requests offered, at three times what the worker computes.
const OFFERED: usize = 20_000;
const OVER: f64 = 3.0;

/// Share of the longest quarter of requests among answers in time, relative to their share among requests.
fn share_of_long_ones(guarded: bool) -> f64 {
    let (mut rng, mut longest) = (StdRng::seed_from_u64(7), Longest::default());
    // When each of those that are there is computed, and its tokens.
    let (mut queue, mut now): (VecDeque<(f64, u64)>, f64) = (VecDeque::new(), 0.0);
    let (mut offered, mut answered) = ([0.0; 2], [0.0; 2]);
    for _ in 0..OFFERED {
        let mean = (PROMPT.start() + PROMPT.end()) as f64 / 2.0;
        now -= (1.0 - rng.random::<f64>()).ln() * mean / RATE / OVER;
        while queue.front().is_some_and(|(end, _)| *end <= now) {
            queue.pop_front();
        }
        let prompt_tokens = rng.random_range(PROMPT);
        let begun = queue.back().map_or(now, |(end, _)| *end);
        let busy = worker(Role::Prefill, "p", |_, load| {
            load.waiting = queue.len() as u32;
            load.waiting_tokens = ((begun - now) * RATE) as u64;
        });
        let demand = Demand {
            time_left: TIME,
            answer_tokens: 1,
            longest: if guarded { longest.get() } else { Duration::ZERO },
            ..demand(Remote, prompt_tokens)
        };
        longest.learn(duration_of(prompt_tokens));
        let is_long = usize::from(prompt_tokens > 400);
        offered[is_long] += 1.0;
        if place(&[d("d"), busy], &demand, &THRESHOLDS, &mut |_| 0).is_ok() {
            let end = begun + prompt_tokens as f64 / RATE;
            assert!(end - now <= TIME.as_secs_f64(), "it is late");
            queue.push_back((end, prompt_tokens));
            answered[is_long] += 1.0;
        }
    }
    let share = |of: [f64; 2]| of[1] / (of[0] + of[1]);
    share(answered) / share(offered)
}

fn duration_of(tokens: u64) -> Duration {
    Duration::from_secs_f64(tokens as f64 / RATE)
}

#[test]
fn judged_by_their_own_length_long_prompts_are_starved() {
    let share = share_of_long_ones(false);
    assert!(share < 0.5, "{share}");
}

/// A model with an occasional long answer: a request with a short deadline is checked with at most half of it.
#[test]
fn answers_longer_than_there_is_time_keep_nobody_out_behind_others() {
    let busy = |tokens: u64| worker(Role::Prefill, "p", |_, load| (load.waiting, load.waiting_tokens) = (1, tokens));
    let (time_left, longest) = (Duration::from_secs(20), Duration::from_secs(3600));
    let demand = Demand { time_left, longest, answer_tokens: 1, ..demand(Remote, 1000) };
    assert_eq!(check(&[d("d"), busy(1000)], demand), "d<-p: remote_policy");
    // 6 s until its turn ends and 9 s more, half of its deadline, and a third of both.
    assert_eq!(check(&[d("d"), busy(5000)], demand), "d<-p: remote_policy", "just in time");
    let later = check(&[d("d"), busy(5100)], demand);
    assert!(later.starts_with("TooLate"), "{later}");
}

#[test]
fn long_prompts_have_their_share_of_a_full_cluster() {
    let share = share_of_long_ones(true);
    assert!(share >= 0.8, "{share}");
}
