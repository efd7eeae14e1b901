//! Several policies over one trace, and what each gave.

use super::args::{PoolSize, SimulateArgs};
use super::names::Names;
use super::rates::Rates;
use super::{Settings, Simulated, simulate};
use crate::bench::report::{About, Report, Slo};
use crate::bench::trace::Trace;
use crate::stdout;
use anyhow::{Context as _, ensure};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Blocks beyond the trace's different ones in a pool with room for everything, in the longest requests: what is computed or generated at
/// once.
const BESIDE_REQUESTS: u64 = 64;

/// Simulates each policy over each size of pools, and prints one table a size.
pub(crate) fn run(args: &SimulateArgs, trace: &Trace, seed: u64, slo: Slo) -> anyhow::Result<Vec<Report>> {
    let rates = Rates::read(args.rates.as_deref())?;
    let names = Names::of_trace(trace);
    let blocks = Blocks::of(trace, &rates);
    let mut reports = Vec::new();
    for &pools in &args.pools {
        let decode_pools = args.decode_pools.unwrap_or(pools);
        let mut reasons = Vec::new();
        let mut table = Table::new(args, trace, (pools, &blocks));
        for &policy in &args.policies {
            let settings = Settings {
                policy,
                prefill: args.prefill.into(),
                decode: args.decode.into(),
                prefill_blocks: blocks.in_pool(pools),
                decode_blocks: blocks.in_pool(decode_pools),
                ttl: args.ttl_s.map(Duration::from_secs),
                gets: !args.no_gets,
                seed,
            };
            let start = Instant::now();
            let Simulated { outcomes, got_tokens } = simulate(&settings, &rates, trace, &names)?;
            let took = start.elapsed();
            let mut about = About { title: format!("simulated, {policy}, {pools}"), ..About::default() };
            let facts = [
                ("policy", policy.name().into()),
                ("prefill_workers", args.prefill.into()),
                ("decode_workers", args.decode.into()),
                ("prefill_pool_blocks", settings.prefill_blocks.into()),
                ("decode_pool_blocks", settings.decode_blocks.into()),
                ("got_tokens", got_tokens.into()),
                ("seed", seed.into()),
                ("simulated_in_s", took.as_secs_f64().into()),
            ];
            about.facts.extend(facts.into_iter().map(|(name, value): (_, serde_json::Value)| (name.to_owned(), value)));
            let report = Report::of(about, &outcomes, slo);
            ensure!(
                report.counts.ok > 0,
                "{pools}: of {} requests none fits; the longest takes {} blocks of {} tokens, prefill pools hold {} and decode pools {}: give larger --pools",
                report.counts.requests,
                blocks.longest,
                trace.block_tokens,
                settings.prefill_blocks,
                settings.decode_blocks,
            );
            table.row(policy.name(), &report, got_tokens, took);
            reasons.push(format!("{policy}: {}", told(&report)));
            reports.push(report);
        }
        stdout::tell(&format!("{}placed, {}\n", table.0, reasons.join("; "))).context("cannot print")?;
    }
    Ok(reports)
}

/// Requests by the reason of their placement.
fn told(report: &Report) -> String {
    report.placement.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}

/// What pools are sized by.
struct Blocks {
    unique: u64,
    longest: u64,
    rates: u64,
}

impl Blocks {
    fn of(trace: &Trace, rates: &Rates) -> Self {
        let block_tokens = u64::from(trace.block_tokens);
        let tokens = |r: &crate::bench::trace::TraceRequest| u64::from(r.prompt_tokens) + u64::from(r.output_tokens);
        let longest = trace.requests.iter().map(tokens).max().unwrap_or(1).div_ceil(block_tokens);
        let unique = trace.infinite_cache().blocks_unique;
        Self { unique, longest, rates: rates.kv.pool_tokens / block_tokens }
    }

    fn in_pool(&self, size: PoolSize) -> u32 {
        let blocks = match size {
            PoolSize::All => self.unique + BESIDE_REQUESTS * self.longest,
            PoolSize::Rates => self.rates,
            PoolSize::Share(share) => (self.unique as f64 * share) as u64,
            PoolSize::Blocks(blocks) => blocks.into(),
        };
        // Block numbers have 32 bits.
        blocks.clamp(1, u64::from(u32::MAX)) as u32
    }
}

/// Lines of text.
struct Table(String);

impl Table {
    fn new(args: &SimulateArgs, trace: &Trace, (pools, blocks): (PoolSize, &Blocks)) -> Self {
        let (requests, seconds) = (trace.requests.len(), trace.span().as_secs_f64());
        let (p, d, each) = (args.prefill, args.decode, blocks.in_pool(pools));
        let infinite = trace.infinite_cache();
        let mut text = format!(
            "{requests} requests in {seconds:.0} s on {p} prefill and {d} decode workers; {pools} ({each} blocks of {} tokens each)\n",
            trace.block_tokens
        );
        let _ = writeln!(text, "an infinite cache hits {:.1}% of the tokens", infinite.token_rate() * 100.0);
        let _ = writeln!(
            text,
            "{:<13} {:>7} {:>8} {:>7} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7} {:>6}",
            "policy", "hits", "of inf.", "got", "TTFT p50", "p95", "p99", "mean", "ITL p50", "p99", "failed", "took"
        );
        Self(text)
    }

    fn row(&mut self, policy: &str, report: &Report, got_tokens: u64, took: Duration) {
        let (ttft, cache) = (&report.ttft_ms, &report.cache);
        let share = |tokens: u64| 100.0 * tokens as f64 / cache.prompt_tokens.max(1) as f64;
        let _ = writeln!(
            self.0,
            "{:<13} {:>6.1}% {:>7.1}% {:>6.1}% {:>7.2} s {:>7.2} s {:>7.2} s {:>7.2} s {:>5.1} ms {:>5.1} ms {:>7} {:>4.1} s",
            policy,
            cache.hit_rate * 100.0,
            cache.of_infinite.unwrap_or(1.0) * 100.0,
            share(got_tokens),
            ttft.p50 / 1e3,
            ttft.p95 / 1e3,
            ttft.p99 / 1e3,
            ttft.mean / 1e3,
            report.itl_ms.p50,
            report.itl_ms.p99,
            report.counts.failed.values().sum::<u64>(),
            took.as_secs_f64()
        );
    }
}
