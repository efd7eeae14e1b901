//! Compares several policies over one trace.

use super::args::{PoolSize, SimulateArgs};
use super::rates;
use super::{Simulated, Traffic};
use crate::bench::report::{About, Report, Slo};
use crate::bench::trace::Trace;
use crate::stdout;
use anyhow::{Context as _, anyhow, ensure};
use baton_simulation::fleet::Fleet;
use baton_simulation::rates::Rates;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of a pool with room for everything, beyond the trace's distinct blocks, in units of the longest request: for the requests being
/// computed or generated at the same time.
const BESIDE_REQUESTS: u64 = 64;

/// Simulates each policy with each pool size, on as many threads as there are processors, and prints one table per size.
pub(crate) fn run(args: &SimulateArgs, trace: Trace, seed: u64, slo: Slo) -> anyhow::Result<Vec<Report>> {
    let rates = Arc::new(rates::read(args.rates.as_deref())?);
    let traffic = Traffic::new(trace, seed);
    let trace = &*traffic.trace;
    let blocks = Blocks::of(trace, &rates);
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    let mut reports = Vec::new();
    for &pools in &args.pools {
        let fleet = |policy| Fleet {
            rates: rates.clone(),
            policy,
            prefill: args.prefill.into(),
            decode: args.decode.into(),
            block_tokens: blocks.block_tokens,
            prefill_blocks: blocks.in_pool(pools),
            decode_blocks: blocks.in_pool(args.decode_pools.unwrap_or(pools)),
            len_max: blocks.longest_tokens,
            ttl: args.ttl_s.map(Duration::from_secs),
            gets: !args.no_gets,
            seed,
        };
        let mut reasons = Vec::new();
        let mut table = Table::new(args, trace, (pools, &blocks));
        for some in args.policies.chunks(at_once) {
            let fleets: Vec<Fleet> = some.iter().map(|&policy| fleet(policy)).collect();
            for (fleet, simulated) in fleets.iter().zip(simulate_all(&traffic, &fleets)) {
                let (Simulated { outcomes, got_tokens, events }, took) = simulated?;
                let policy = fleet.policy;
                let title = format!("simulated, {policy}, {pools}");
                let facts = [
                    ("policy", policy.name().into()),
                    ("prefill_workers", args.prefill.into()),
                    ("decode_workers", args.decode.into()),
                    ("block_tokens", fleet.block_tokens.into()),
                    ("prefill_pool_blocks", fleet.prefill_blocks.into()),
                    ("decode_pool_blocks", fleet.decode_blocks.into()),
                    ("got_tokens", got_tokens.into()),
                    ("seed", seed.into()),
                    ("simulated_in_s", took.as_secs_f64().into()),
                    ("simulated_events", events.into()),
                ];
                let facts = facts.into_iter().map(|(name, value): (_, serde_json::Value)| (name.to_owned(), value));
                let report = Report::of(About { title, facts: facts.collect() }, &outcomes, slo);
                ensure!(
                    report.counts.ok > 0,
                    "{pools}: of {} requests none fits; the longest has {} tokens, prefill pools hold {} and decode pools {}: give larger --pools",
                    report.counts.requests,
                    blocks.longest_tokens,
                    u64::from(fleet.prefill_blocks) * u64::from(fleet.block_tokens),
                    u64::from(fleet.decode_blocks) * u64::from(fleet.block_tokens),
                );
                table.row(policy.name(), &report, got_tokens, took);
                reasons.push(format!("{policy}: {}", told(&report)));
                reports.push(report);
            }
        }
        stdout::tell(&format!("{}placed, {}\n", table.0, reasons.join("; "))).context("cannot print")?;
    }
    Ok(reports)
}

/// Runs each simulation on its own thread and returns it with the time that it took.
fn simulate_all(traffic: &Traffic, fleets: &[Fleet]) -> Vec<anyhow::Result<(Simulated, Duration)>> {
    let simulate = |fleet| {
        let start = Instant::now();
        Ok((traffic.simulate(fleet)?, start.elapsed()))
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = fleets.iter().map(|fleet| scope.spawn(move || simulate(fleet))).collect();
        let ended = running.into_iter().map(|thread| thread.join());
        ended.map(|ended| ended.unwrap_or_else(|_| Err(anyhow!("a simulation panicked")))).collect()
    })
}

/// Requests by the reason of their placement.
fn told(report: &Report) -> String {
    report.placement.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}

/// The quantities that pool sizes derive from: blocks of the trace, unless stated otherwise.
struct Blocks {
    unique: u64,
    longest: u64,
    rates: u64,
    /// Tokens of the longest request.
    longest_tokens: u32,
    /// Tokens of a block of the trace.
    trace_tokens: u32,
    /// Tokens of a block of a pool.
    block_tokens: u32,
}

impl Blocks {
    fn of(trace: &Trace, rates: &Rates) -> Self {
        let trace_tokens = trace.block_tokens;
        let longest_tokens = trace.requests.iter().map(|r| r.prompt_tokens + r.output_tokens).max().unwrap_or(1);
        Self {
            unique: trace.infinite_cache().blocks_unique,
            longest: longest_tokens.div_ceil(trace_tokens).into(),
            rates: rates.kv.pool_tokens / u64::from(trace_tokens),
            longest_tokens,
            trace_tokens,
            block_tokens: Fleet::block_tokens(trace_tokens),
        }
    }

    fn each(&self, size: PoolSize) -> u64 {
        let blocks = match size {
            PoolSize::All => self.unique + BESIDE_REQUESTS * self.longest,
            PoolSize::Rates => self.rates,
            PoolSize::Share(share) => (self.unique as f64 * share) as u64,
            PoolSize::Blocks(blocks) => blocks.into(),
        };
        blocks.max(1)
    }

    /// Blocks of a pool of this size.
    fn in_pool(&self, size: PoolSize) -> u32 {
        let blocks = self.each(size) * u64::from(self.trace_tokens) / u64::from(self.block_tokens);
        // Block numbers have 32 bits.
        blocks.clamp(1, u64::from(u32::MAX)) as u32
    }
}

/// A table with one line per policy, as text.
struct Table(String);

impl Table {
    fn new(args: &SimulateArgs, trace: &Trace, (pools, blocks): (PoolSize, &Blocks)) -> Self {
        let (requests, seconds) = (trace.requests.len(), trace.span().as_secs_f64());
        let (p, d, each) = (args.prefill, args.decode, blocks.each(pools));
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
