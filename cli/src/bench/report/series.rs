//! Points for plots: distributions, and series over time.

use super::distribution::Times;
use super::{Ending, Outcome, rate};
use serde::Serialize;
use std::time::Duration;

/// Windows into which the duration of a load is divided, at least and at most.
const WINDOWS: (usize, usize) = (10, 60);
/// Requests that a window should have.
const WINDOW_REQUESTS: usize = 5;
/// Points of a distribution.
const POINTS: usize = 100;

/// Everything that is plotted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Series {
    /// Percentiles 1 to 100 of the time to the first token, in milliseconds.
    pub(crate) ttft_ms: Vec<f64>,
    /// The same for gaps between tokens.
    pub(crate) itl_ms: Vec<f64>,
    /// In order of time, all of one length.
    pub(crate) windows: Vec<Window>,
}

/// One window of time. Requests count in the window of their arrival.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Window {
    /// Its beginning, in seconds from the start of the load.
    pub(crate) from_s: f64,
    /// Its end, in seconds from the start of the load.
    pub(crate) to_s: f64,
    /// Milliseconds to the first token, median; absent if no request had one.
    pub(crate) ttft_p50_ms: Option<f64>,
    /// The same of the 95th percentile.
    pub(crate) ttft_p95_ms: Option<f64>,
    /// Most requests in flight at once.
    pub(crate) in_flight_max: u64,
    /// Share of hits among the prompt tokens of completed requests; absent if there were none.
    pub(crate) hit_rate: Option<f64>,
    /// The hit rate of an infinite cache for the same requests.
    pub(crate) infinite_hit_rate: Option<f64>,
}

impl Series {
    pub(super) fn of(outcomes: &[Outcome], elapsed: Duration) -> Self {
        let ttft = Times::of(outcomes.iter().filter_map(ttft_ms));
        let itl = Times::of(outcomes.iter().flat_map(Outcome::gaps_ms));
        Self { ttft_ms: points(&ttft), itl_ms: points(&itl), windows: windows(outcomes, elapsed) }
    }
}

fn ttft_ms(outcome: &Outcome) -> Option<f64> {
    outcome.ttft.map(|ttft| ttft.as_secs_f64() * 1e3)
}

fn points(times: &Times) -> Vec<f64> {
    (1..=POINTS).filter_map(|point| times.quantile(point as f64 / POINTS as f64)).collect()
}

fn windows(outcomes: &[Outcome], elapsed: Duration) -> Vec<Window> {
    let count = (outcomes.len() / WINDOW_REQUESTS).clamp(WINDOWS.0, WINDOWS.1);
    let length = elapsed.as_secs_f64() / count as f64;
    if length <= 0.0 {
        return Vec::new();
    }
    let number = |time: Duration| ((time.as_secs_f64() / length) as usize).min(count - 1);
    let mut arrived: Vec<Vec<&Outcome>> = vec![Vec::new(); count];
    outcomes.iter().for_each(|outcome| arrived[number(outcome.at)].push(outcome));
    let busy = in_flight(outcomes, count, number);
    let of = |(index, arrived): (usize, &Vec<&Outcome>)| {
        let ttft = Times::of(arrived.iter().filter_map(|outcome| ttft_ms(outcome)));
        let whole = || arrived.iter().filter(|outcome| outcome.result == Ending::Ok);
        let sum = |of: fn(&Outcome) -> u32| whole().map(|outcome| u64::from(of(outcome))).sum::<u64>();
        let prompt = sum(|outcome| outcome.prompt_tokens);
        let share = |tokens| (prompt > 0).then(|| rate(tokens, prompt));
        Window {
            from_s: index as f64 * length,
            to_s: (index + 1) as f64 * length,
            ttft_p50_ms: ttft.quantile(0.5),
            ttft_p95_ms: ttft.quantile(0.95),
            in_flight_max: busy[index],
            hit_rate: share(sum(|outcome| outcome.cached_tokens)),
            infinite_hit_rate: share(sum(|outcome| outcome.infinite_tokens)),
        }
    };
    arrived.iter().enumerate().map(of).collect()
}

/// Most requests at once in each window.
fn in_flight(outcomes: &[Outcome], windows: usize, number: impl Fn(Duration) -> usize) -> Vec<u64> {
    let sent = outcomes.iter().filter(|outcome| outcome.result != Ending::Shed);
    let mut changes: Vec<(Duration, i64)> = sent.flat_map(|outcome| [(outcome.at, 1), (outcome.end, -1)]).collect();
    // At the same instant, ends count before starts.
    changes.sort_unstable();
    let (mut most, mut now, mut window) = (vec![0; windows], 0_i64, 0);
    for (time, change) in changes {
        let next = number(time);
        // The number in flight holds in all windows up to the next change.
        most[window..=next].iter_mut().for_each(|most| *most = now.max(*most));
        (window, now) = (next, now + change);
        most[window] = most[window].max(now);
    }
    most.into_iter().map(|count| u64::try_from(count).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::outcome;
    use super::*;

    #[test]
    fn windows_hold_what_arrives_in_them_and_what_is_under_way() {
        // 10 windows of 600 ms. The first is in flight from 0 to 0.7 s, the second from 1.8 s to the end, the third within the fourth
        // window.
        let outcomes = [outcome(0, 400, 100), outcome(1_800, 1_200, 1_000), outcome(1_850, 10, 1)];
        let windows = Series::of(&outcomes, Duration::from_secs(6)).windows;
        let near = |got: f64, want: f64| (got - want).abs() < 1e-9;
        assert!(windows.len() == 10 && near(windows[3].from_s, 1.8) && near(windows[9].to_s, 6.0), "{windows:?}");
        let ttft = |index: usize| (windows[index].ttft_p50_ms, windows[index].ttft_p95_ms);
        assert_eq!([ttft(0), ttft(1)], [(Some(400.0), Some(400.0)), (None, None)]);
        assert_eq!(ttft(3), (Some(10.0), Some(1_200.0)));
        let busy: Vec<u64> = windows.iter().map(|window| window.in_flight_max).collect();
        assert_eq!(busy, [1, 1, 0, 2, 1, 1, 1, 1, 1, 1]);
        let rates = |index: usize| (windows[index].hit_rate, windows[index].infinite_hit_rate);
        assert_eq!([rates(0), rates(1)], [(Some(0.32), Some(0.64)), (None, None)]);
        let many: Vec<Outcome> = (0..1_000).map(|at| outcome(at, 1, 1)).collect();
        assert_eq!(Series::of(&many, Duration::from_secs(1)).windows.len(), 60);
    }

    #[test]
    fn distributions_have_a_point_a_hundredth() {
        let outcomes: Vec<Outcome> = (1..=200).map(|ms| outcome(0, ms, 5)).collect();
        let series = Series::of(&outcomes, Duration::from_secs(1));
        assert_eq!((series.ttft_ms[0], series.ttft_ms[49], series.ttft_ms[99]), (2.0, 100.0, 200.0));
        assert_eq!(series.itl_ms, [5.0; 100]);
        assert_eq!(Series::of(&[], Duration::ZERO), Series::default());
    }
}
