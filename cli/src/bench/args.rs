//! Flags of `baton bench`.

use super::load::{Fit, Pace, Synthetic, TokenRange, TooLong};
use super::report::Slo;
use super::simulate::SimulateArgs;
use super::trace::Format;
use crate::router::RouterArgs;
use clap::Args;
use std::path::PathBuf;

/// Most concurrent requests on one connection: the number of streams that a router allows.
const IN_FLIGHT_MAX: i64 = 4_096;

/// Arguments of `baton bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// Trace of requests to replay: Mooncake's JSON lines or Azure's CSV. Without a trace, the load is synthetic requests of equal size.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(super) router: RouterArgs,
    /// Served name of the model; optional if the cluster serves only one.
    #[arg(long, default_value = "")]
    pub(super) model: String,
    /// Seed of the random prompts. By default each run draws another one, so that it does not hit the cache of an earlier run.
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// First and last token id that prompts may contain. The default range is ordinary text in any vocabulary of at least 32,000 ids.
    #[arg(long, value_name = "FIRST-LAST", default_value_t)]
    pub(super) token_ids: TokenRange,
    /// Timeout of one request, in seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub(super) timeout_s: u64,
    /// TTFT limit for goodput, in milliseconds.
    #[arg(long, value_name = "MS", value_parser = positive)]
    slo_ttft_ms: Option<f64>,
    /// Limit for goodput on the mean time between a request's tokens, in milliseconds.
    #[arg(long, value_name = "MS", value_parser = positive)]
    slo_itl_ms: Option<f64>,
    /// Write the report to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Write the report to this file as an HTML page with plots.
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    // Last: arguments after a heading appear under it in the help.
    #[command(flatten)]
    pub(super) replay: ReplayArgs,
    #[command(flatten)]
    pub(super) synthetic: SyntheticArgs,
    #[command(flatten)]
    pub(super) simulate: SimulateArgs,
}

/// How a trace is replayed.
#[derive(Args, Debug)]
#[command(next_help_heading = "Replaying a trace")]
pub(super) struct ReplayArgs {
    /// Format of the trace; by default it is detected from the first line.
    #[arg(long, requires = "trace")]
    pub(super) format: Option<Format>,
    /// Number of requests to skip at the beginning.
    #[arg(long, value_name = "REQUESTS", default_value_t = 0, requires = "trace")]
    from: usize,
    /// Maximum number of requests to replay, after those skipped.
    #[arg(long, value_name = "REQUESTS", requires = "trace")]
    limit: Option<usize>,
    /// Speed-up of arrivals: 2 replays the trace in half its time.
    #[arg(long, default_value_t = 1.0, value_parser = positive, requires = "trace")]
    speed: f64,
    /// Factor for prompt and answer lengths, at most 1. Shared prefixes stay shared: blocks are scaled too, to a multiple of 16 tokens.
    #[arg(long, default_value_t = 1.0, value_parser = up_to_one, requires = "trace")]
    scale: f64,
    /// Context length of the model in tokens, for prompt and answer together.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..), requires = "trace")]
    context_max: Option<u32>,
    /// What to do with requests longer than --context-max.
    #[arg(long, value_enum, default_value_t, requires = "context_max")]
    too_long: TooLong,
    /// Maximum number of requests in flight. Requests due beyond it are counted as shed and not sent.
    #[arg(long, value_name = "REQUESTS", default_value_t = 1_024, requires = "trace",
          value_parser = clap::value_parser!(u32).range(1..=IN_FLIGHT_MAX))]
    in_flight_max: u32,
}

/// What is sent without a trace.
#[derive(Args, Debug)]
#[command(next_help_heading = "Without a trace")]
pub(super) struct SyntheticArgs {
    /// Number of requests to send.
    #[arg(long, default_value_t = 100, conflicts_with = "trace", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Number of requests in flight: the next one is sent when an answer is complete.
    #[arg(long, default_value_t = 8, conflicts_with = "trace", value_parser = clap::value_parser!(u32).range(1..=IN_FLIGHT_MAX))]
    concurrency: u32,
    /// Length of each prompt, in tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, conflicts_with = "trace",
          value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    prompt_tokens: u32,
    /// Length of each answer, in tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, conflicts_with = "trace",
          value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    output_tokens: u32,
    /// Length of the prefix that all prompts share, in tokens; at most --prompt-tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 0, conflicts_with = "trace")]
    shared_prefix_tokens: u32,
}

impl BenchArgs {
    pub(super) fn slo(&self) -> Slo {
        Slo { ttft_ms: self.slo_ttft_ms, itl_ms: self.slo_itl_ms }
    }
}

impl ReplayArgs {
    pub(super) fn fit(&self) -> Fit {
        Fit {
            from: self.from,
            limit: self.limit.unwrap_or(usize::MAX),
            scale: self.scale,
            context_max: self.context_max.unwrap_or(u32::MAX),
            too_long: self.too_long,
            speed: self.speed,
        }
    }

    pub(super) fn pace(&self) -> Pace {
        Pace::Open { in_flight_max: self.in_flight_max as usize }
    }
}

impl SyntheticArgs {
    /// # Errors
    /// If the prefix is longer than the prompt.
    pub(super) fn synthetic(&self) -> anyhow::Result<Synthetic> {
        let (shared, prompt) = (self.shared_prefix_tokens, self.prompt_tokens);
        anyhow::ensure!(shared <= prompt, "--shared-prefix-tokens {shared} is more than --prompt-tokens {prompt}");
        Ok(Synthetic {
            requests: self.requests,
            prompt_tokens: prompt,
            output_tokens: self.output_tokens,
            shared_prefix_tokens: shared,
        })
    }

    pub(super) fn pace(&self) -> Pace {
        Pace::Closed { concurrency: self.concurrency as usize }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0).ok_or("give a number over 0".into())
}

fn up_to_one(text: &str) -> Result<f64, String> {
    positive(text).ok().filter(|number| *number <= 1.0).ok_or("give a number over 0, up to 1".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn parsed(line: &str) -> Result<BenchArgs, String> {
        let line = Line::try_parse_from(std::iter::once("bench").chain(line.split_whitespace()));
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn a_trace_is_changed_as_it_is_said() {
        let args =
            parsed("--trace x --scale 0.05 --context-max 2048 --too-long cut --from 3 --limit 5 --speed 10").unwrap();
        let fit = args.replay.fit();
        assert_eq!((fit.from, fit.limit, fit.scale, fit.speed), (3, 5, 0.05, 10.0));
        assert_eq!((fit.context_max, fit.too_long), (2_048, TooLong::Cut));
        assert_eq!(parsed("--trace x").unwrap().replay.fit(), Fit::default());
        assert_eq!(args.slo(), Slo::default());
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        let check = |line: &str, expected: &str| {
            let error = parsed(line).map(drop).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check("--trace x --requests 5", "cannot be used with");
        check("--scale 0.5", "--trace");
        check("--trace x --too-long cut", "--context-max");
        check("--trace x --scale 2", "up to 1");
        check("--trace x --speed 0", "over 0");
        check("--trace x --speed nan", "over 0");
        check("--concurrency 0", "0 is not in");
        check("--token-ids 7", "1000-31999");
        let prefix = parsed("--prompt-tokens 10 --shared-prefix-tokens 11").unwrap().synthetic.synthetic();
        assert!(prefix.unwrap_err().to_string().contains("--prompt-tokens 10"));
    }
}
