//! The results of a load. Computed only from outcomes, so that a replay and a simulation are reported in the same way.

mod distribution;
mod html;
mod outcome;
mod plots;
mod series;
mod table;

use distribution::Distribution;
pub(crate) use outcome::{Ending, Outcome};
use serde::Serialize;
use series::Series;
use std::collections::BTreeMap;
use std::time::Duration;

/// The SLO for goodput: the longest times of a request, in milliseconds. An absent limit is not checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Slo {
    /// To the first token.
    pub(crate) ttft_ms: Option<f64>,
    /// Between two tokens: mean of the request.
    pub(crate) itl_ms: Option<f64>,
}

/// The description of the load: a title, and facts in the order in which they are printed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct About {
    /// One line, printed above the facts.
    pub(crate) title: String,
    /// Further facts for the reader, by name.
    pub(crate) facts: serde_json::Map<String, serde_json::Value>,
}

/// The report of a load. Serialized, it is the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    pub(crate) about: About,
    pub(crate) counts: Counts,
    /// From the start of the load to the end of the last request.
    pub(crate) elapsed_s: f64,
    /// Time to the first token, in milliseconds.
    pub(crate) ttft_ms: Distribution,
    /// Time between two tokens of an answer, in milliseconds.
    pub(crate) itl_ms: Distribution,
    /// Time to the end of completed requests, in milliseconds.
    pub(crate) end_to_end_ms: Distribution,
    pub(crate) tokens: Tokens,
    /// Absent if no SLO was given.
    pub(crate) goodput: Option<Goodput>,
    pub(crate) cache: Cache,
    /// Requests by placement or its reason, as far as known.
    pub(crate) placement: BTreeMap<String, u64>,
    /// Values over time, for the plots of the page.
    pub(crate) series: Series,
}

/// Requests by how they ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Counts {
    pub(crate) requests: u64,
    /// Requests whose answer arrived completely.
    pub(crate) ok: u64,
    /// By kind of error.
    pub(crate) failed: BTreeMap<String, u64>,
    /// Cut off by the end of the load.
    pub(crate) cancelled: u64,
    /// Not sent when due, because the maximum number of requests was in flight.
    pub(crate) shed: u64,
}

/// Tokens of completed requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tokens {
    pub(crate) prompt: u64,
    pub(crate) output: u64,
    pub(crate) prompt_per_s: f64,
    pub(crate) output_per_s: f64,
}

/// Completed requests that met the SLO.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Goodput {
    pub(crate) slo: Slo,
    pub(crate) met: u64,
    /// Of all requests, including shed and failed ones.
    pub(crate) share: f64,
    pub(crate) requests_per_s: f64,
}

/// Cache hits of completed requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Cache {
    pub(crate) prompt_tokens: u64,
    /// From the usage of answers.
    pub(crate) cached_tokens: u64,
    pub(crate) hit_rate: f64,
    /// The hits of an infinite cache for the same requests.
    pub(crate) infinite_tokens: u64,
    pub(crate) infinite_hit_rate: f64,
    /// Ratio of the first to the second; absent if no hit was possible.
    pub(crate) of_infinite: Option<f64>,
}

impl Report {
    /// The report of outcomes in any order.
    pub(crate) fn of(about: About, outcomes: &[Outcome], slo: Slo) -> Self {
        let elapsed = outcomes.iter().map(|outcome| outcome.end).max().unwrap_or_default();
        let elapsed_s = elapsed.as_secs_f64();
        let whole = || outcomes.iter().filter(|outcome| outcome.result == Ending::Ok);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let sum = |of: fn(&Outcome) -> u32| whole().map(|outcome| u64::from(of(outcome))).sum::<u64>();
        let (prompt, output) = (sum(|o| o.prompt_tokens), sum(|o| o.output_tokens));
        let mut placement = BTreeMap::new();
        for place in outcomes.iter().filter_map(|outcome| outcome.placement.as_deref()) {
            *placement.entry(place.to_owned()).or_insert(0) += 1;
        }
        Self {
            about,
            counts: Counts::of(outcomes),
            elapsed_s,
            ttft_ms: Distribution::of(outcomes.iter().filter_map(|outcome| outcome.ttft).map(ms)),
            itl_ms: Distribution::of(outcomes.iter().flat_map(Outcome::gaps_ms)),
            end_to_end_ms: Distribution::of(whole().map(|outcome| ms(outcome.end.saturating_sub(outcome.at)))),
            tokens: Tokens {
                prompt,
                output,
                prompt_per_s: per(prompt, elapsed_s),
                output_per_s: per(output, elapsed_s),
            },
            goodput: Goodput::of(outcomes, slo, elapsed_s),
            cache: Cache::of(prompt, sum(|o| o.cached_tokens), sum(|o| o.infinite_tokens)),
            placement,
            series: Series::of(outcomes, elapsed),
        }
    }

    /// For people in a terminal.
    pub(crate) fn table(&self) -> String {
        table::of(self)
    }

    /// The report as one self-contained HTML page.
    pub(crate) fn html(&self) -> String {
        html::page(self)
    }
}

impl Counts {
    fn of(outcomes: &[Outcome]) -> Self {
        let mut counts = Self { requests: outcomes.len() as u64, ..Self::default() };
        for outcome in outcomes {
            match &outcome.result {
                Ending::Ok => counts.ok += 1,
                Ending::Failed(kind) => *counts.failed.entry(kind.clone()).or_default() += 1,
                Ending::Cancelled => counts.cancelled += 1,
                Ending::Shed => counts.shed += 1,
            }
        }
        counts
    }
}

impl Goodput {
    fn of(outcomes: &[Outcome], slo: Slo, elapsed_s: f64) -> Option<Self> {
        if slo == Slo::default() {
            return None;
        }
        let met = outcomes.iter().filter(|outcome| outcome.meets(slo)).count() as u64;
        Some(Self { slo, met, share: rate(met, outcomes.len() as u64), requests_per_s: per(met, elapsed_s) })
    }
}

impl Cache {
    fn of(prompt_tokens: u64, cached_tokens: u64, infinite_tokens: u64) -> Self {
        Self {
            prompt_tokens,
            cached_tokens,
            hit_rate: rate(cached_tokens, prompt_tokens),
            infinite_tokens,
            infinite_hit_rate: rate(infinite_tokens, prompt_tokens),
            of_infinite: (infinite_tokens > 0).then(|| rate(cached_tokens, infinite_tokens)),
        }
    }
}

/// A share; 0 if the whole is 0.
fn rate(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// A rate per second; 0 if no time passed.
fn per(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A request that arrives after `at_ms` and has 4 tokens: the first after `ttft_ms`, the others each `gap_ms` later.
    pub(crate) fn outcome(at_ms: u64, ttft_ms: u64, gap_ms: u32) -> Outcome {
        let end = Duration::from_millis(at_ms + ttft_ms + 3 * u64::from(gap_ms));
        Outcome {
            at: Duration::from_millis(at_ms),
            ttft: Some(Duration::from_millis(ttft_ms)),
            gaps_us: vec![gap_ms * 1_000; 3],
            end,
            prompt_tokens: 100,
            cached_tokens: 32,
            infinite_tokens: 64,
            output_tokens: 4,
            placement: Some("remote".into()),
            result: Ending::Ok,
        }
    }

    pub(crate) fn some() -> Report {
        let failed = |result| Outcome { result, ttft: None, gaps_us: Vec::new(), ..outcome(500, 0, 0) };
        let outcomes = [
            outcome(0, 100, 10),
            outcome(1_000, 300, 20),
            outcome(2_000, 900, 300),
            failed(Ending::Failed("overloaded".into())),
            failed(Ending::Shed),
        ];
        let slo = Slo { ttft_ms: Some(300.0), itl_ms: Some(15.0) };
        Report::of(About { title: "a load".into(), ..About::default() }, &outcomes, slo)
    }

    #[test]
    fn every_request_counts_once() {
        let report = some();
        assert_eq!((report.counts.requests, report.counts.ok, report.counts.shed), (5, 3, 1));
        assert_eq!(report.counts.failed, BTreeMap::from([("overloaded".to_owned(), 1)]));
        assert_eq!(report.placement, BTreeMap::from([("remote".to_owned(), 5)]));
        assert!((report.elapsed_s - 3.8).abs() < 1e-9, "{}", report.elapsed_s);
    }

    #[test]
    fn times_and_rates_are_of_what_was_answered() {
        let report = some();
        assert_eq!((report.ttft_ms.count, report.ttft_ms.p50, report.ttft_ms.max), (3, 300.0, 900.0));
        assert_eq!((report.itl_ms.count, report.itl_ms.p50, report.itl_ms.p95), (9, 20.0, 300.0));
        assert_eq!((report.end_to_end_ms.count, report.end_to_end_ms.p50), (3, 360.0));
        assert_eq!((report.tokens.prompt, report.tokens.output), (300, 12));
        assert!((report.tokens.output_per_s - 12.0 / 3.8).abs() < 1e-9);
    }

    #[test]
    fn goodput_is_what_met_both_of_all_that_came() {
        let goodput = some().goodput.unwrap();
        assert_eq!((goodput.met, goodput.share), (1, 0.2));
        assert!((goodput.requests_per_s - 1.0 / 3.8).abs() < 1e-9);
        assert_eq!(Report::of(About::default(), &[outcome(0, 1, 1)], Slo::default()).goodput, None);
        let one = |slo| Report::of(About::default(), &[outcome(0, 300, 20)], slo).goodput.unwrap().met;
        assert_eq!(one(Slo { ttft_ms: Some(300.0), itl_ms: None }), 1);
        assert_eq!(one(Slo { ttft_ms: None, itl_ms: Some(19.9) }), 0);
    }

    #[test]
    fn hits_stand_against_an_infinite_cache() {
        let cache = some().cache;
        assert_eq!((cache.prompt_tokens, cache.cached_tokens, cache.infinite_tokens), (300, 96, 192));
        assert_eq!((cache.hit_rate, cache.infinite_hit_rate, cache.of_infinite), (0.32, 0.64, Some(0.5)));
        let nothing = Report::of(About::default(), &[], Slo::default());
        assert_eq!((nothing.cache.of_infinite, nothing.elapsed_s, nothing.ttft_ms.count), (None, 0.0, 0));
    }

    #[test]
    fn scripts_read_json() {
        let json = serde_json::to_value(some()).unwrap();
        assert_eq!(json["ttft_ms"]["p95"], 900.0);
        assert_eq!(json["counts"]["failed"]["overloaded"], 1);
        assert_eq!(json["goodput"]["slo"]["ttft_ms"], 300.0);
        assert_eq!(json["about"]["title"], "a load");
    }
}
