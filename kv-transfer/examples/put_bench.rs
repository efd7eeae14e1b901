//! Puts of 6, 48 and 384 KiB between two processes on this host: the service against a bare UCX loop over the same lanes.
//!
//! `cargo run --release --example put_bench [-- --tls LIST]` prints one JSON object a line: `name`, `value`, `unit`, `ratio`, `of`.

use anyhow::{Context, Result, bail};
use baton_kv_transfer::bench::{Bare, Tuning};
use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::{Dtype, Fence, InstanceId, KvLayout, KvPoolMap};
use std::io::{BufRead, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SIZES: [usize; 3] = [6 << 10, 48 << 10, 384 << 10];
const LAYERS: u32 = 16;
/// Bytes of one measured round, rounds on one connection, and connections: how fast one is depends on how its threads and sockets
/// happened to settle.
const ROUND_BYTES: usize = 24 << 20;
const ROUNDS: usize = 9;
const CONNECTIONS: usize = 7;
const WINDOW: usize = 8 << 20;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [] => source(TransportChoice::UCX_TLS_DEFAULT),
        ["--tls", tls] => source(tls),
        ["sink-bare", tls, tuning] => sink_bare(tls, tuning_of(tuning)?),
        ["sink-service", tls, size] => sink_service(tls, size.parse()?),
        _ => bail!("usage: put_bench [--tls LIST]"),
    }
}

/// A child in the role of the sink, and the first line that it prints.
fn spawn(args: &[&str]) -> Result<(Child, String)> {
    let mut child =
        Command::new(std::env::current_exe()?).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.take().context("stdout is piped")?).read_line(&mut line)?;
    Ok((child, line.trim().to_owned()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    (0..text.len() / 2).map(|i| Ok(u8::from_str_radix(&text[2 * i..2 * i + 2], 16)?)).collect()
}

/// True once standard input has ended, which is when the parent is done.
fn parent_is_done() -> Arc<AtomicBool> {
    let done = Arc::new(AtomicBool::new(false));
    let flag = done.clone();
    std::thread::spawn(move || {
        std::io::stdin().lines().for_each(drop);
        flag.store(true, Ordering::Relaxed);
    });
    done
}

fn tuning_of(name: &str) -> Result<Tuning> {
    let known = [Tuning::Defaults, Tuning::Ours].into_iter().find(|t| format!("{t:?}") == name);
    known.with_context(|| format!("no tuning {name}"))
}

fn sink_bare(tls: &str, tuning: Tuning) -> Result<()> {
    let mut bare = Bare::start(tls, tuning, ROUND_BYTES).map_err(anyhow::Error::msg)?;
    let (address, key, base) = bare.card().map_err(anyhow::Error::msg)?;
    println!("{} {} {base}", hex(&address), hex(&key));
    std::io::stdout().flush()?;
    let done = parent_is_done();
    bare.serve(|| done.load(Ordering::Relaxed));
    Ok(())
}

/// A layout whose block holds `size` bytes of one layer, and a pool of scattered blocks that takes one round.
fn map(size: usize) -> Result<KvPoolMap> {
    let layout = KvLayout::llama(16, LAYERS, 1, (size / 16 / 2 / 2) as u32, Dtype::Bf16)?;
    Ok(KvPoolMap::try_new(layout, 2 * (ROUND_BYTES / size / LAYERS as usize) as u32)?)
}

fn trial(name: &str, tls: &str, writes: UcxWrites, map: KvPoolMap) -> Result<Trial> {
    let (tls, bind) = (Some(tls.to_owned()), [127, 0, 0, 1].into());
    let choice = TransportChoice::Ucx { tls, bind, devices: None, writes };
    let mut config = Trial::config(InstanceId::try_new(name)?, choice, map);
    config.limits.in_flight_bytes_max = WINDOW;
    Ok(Trial::start(config)?)
}

fn sink_service(tls: &str, size: usize) -> Result<()> {
    let trial = trial("sink", tls, UcxWrites::ByLanes, map(size)?)?;
    println!("{}", hex(&trial.address().to_bytes()));
    std::io::stdout().flush()?;
    let done = parent_is_done();
    while !done.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
    trial.stop();
    Ok(())
}

fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// The bare loop, connected to its sink.
struct BareLoop {
    bare: Bare,
    sink: Child,
    lanes: String,
}

impl BareLoop {
    fn start(tls: &str, tuning: Tuning, size: usize) -> Result<Self> {
        let (sink, card) = spawn(&["sink-bare", tls, &format!("{tuning:?}")])?;
        let [address, key, base] = card.split(' ').collect::<Vec<_>>()[..] else {
            bail!("no card from the sink: {card:?}")
        };
        let mut bare = Bare::start(tls, tuning, ROUND_BYTES).map_err(anyhow::Error::msg)?;
        let lanes = bare.connect((unhex(address)?, unhex(key)?, base.parse()?)).map_err(anyhow::Error::msg)?;
        bare.put(size, 4 << 20, WINDOW); // Wires the lanes up.
        Ok(Self { bare, sink, lanes })
    }

    fn round(&self, size: usize) -> f64 {
        let total = ROUND_BYTES / size * size;
        rate(total as u64, self.bare.put(size, total, WINDOW))
    }

    fn stop(mut self) -> Result<()> {
        drop(self.bare);
        drop(self.sink.stdin.take());
        self.sink.wait()?;
        Ok(())
    }
}

/// Our service, connected to a sink of its own.
struct ServiceLoop {
    trial: Trial,
    sink: Child,
    peer: Peer,
    map: KvPoolMap,
}

impl ServiceLoop {
    fn start(tls: &str, writes: UcxWrites, size: usize) -> Result<Self> {
        let (sink, address) = spawn(&["sink-service", tls, &size.to_string()])?;
        let map = map(size)?;
        let peer = Trial::peer(InstanceId::try_new("sink")?, TransferAddress::from_bytes(&unhex(&address)?)?);
        Ok(Self { trial: trial("source", tls, writes, map.clone())?, sink, peer, map })
    }

    /// Milliseconds from the end of compute to adoption, when everything but the last layer is there: what no overlap can hide.
    fn exposed_ms(&mut self) -> Result<f64> {
        let tokens = 1024.min(self.trial.tokens_max());
        let fence: Fence = Arc::new(AlreadyDone);
        let outgoing = self.trial.open(&self.peer, tokens)?;
        (0..LAYERS - 1).for_each(|layer| outgoing.layer_launched(layer, tokens as usize, &fence));
        let all = self.map.layout().bytes_per_token() as u64 * u64::from(tokens);
        let sent = || self.trial.transfer().stats().total.bytes_sent;
        let (before, until) = (sent(), Instant::now() + Duration::from_secs(5));
        while sent() < before + all / 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        let end = Instant::now();
        outgoing.layer_launched(LAYERS - 1, tokens as usize, &fence);
        trial::finish(&outgoing, tokens);
        let report = outgoing.wait()?;
        Ok((report.acked_at - end).as_secs_f64() * 1e3)
    }

    /// Rates of the puts, from the first one posted to the last flush while checksums and everything else run, and of the whole handoff.
    fn round(&mut self, size: usize) -> Result<(f64, f64)> {
        let Moved { report, took } = self.trial.hand_off(&self.peer)?;
        if report.bytes / report.puts != size as u64 {
            bail!("the service wrote puts of {} bytes", report.bytes / report.puts);
        }
        let puts = rate(report.bytes, report.flushed_at - report.first_put_at);
        Ok((puts, rate(report.bytes, took)))
    }

    fn stop(mut self) -> Result<()> {
        drop(self.sink.stdin.take());
        self.trial.stop();
        self.sink.wait()?;
        Ok(())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The largest: whatever else runs can only take away from a rate.
fn best(rates: impl Iterator<Item = f64>) -> f64 {
    rates.fold(0.0, f64::max)
}

/// Rates on fresh connections: of the bare loops with UCX's own settings and with ours, of our writes, of whole handoffs, and of our
/// writes where they are forced to be UCX's puts; and the lanes.
fn connection(tls: &str, size: usize) -> Result<([f64; 5], String)> {
    let (bare, tuned) = (BareLoop::start(tls, Tuning::Defaults, size)?, BareLoop::start(tls, Tuning::Ours, size)?);
    let mut service = ServiceLoop::start(tls, UcxWrites::ByLanes, size)?;
    let mut forced = ServiceLoop::start(tls, UcxWrites::OneSided, size)?;
    service.round(size)?; // Connects.
    forced.round(size)?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let (plain, tuned) = (bare.round(size), tuned.round(size));
        let (ours, whole) = service.round(size)?;
        let (forced, _) = forced.round(size)?;
        rounds.push([plain, tuned, ours, whole, forced]);
    }
    let lanes = bare.lanes.clone();
    bare.stop()?;
    tuned.stop()?;
    service.stop()?;
    forced.stop()?;
    Ok(([0, 1, 2, 3, 4].map(|series| best(rounds.iter().map(|round| round[series]))), lanes))
}

fn source(tls: &str) -> Result<()> {
    for size in SIZES {
        let connections = (0..CONNECTIONS).map(|_| connection(tls, size)).collect::<Result<Vec<_>>>()?;
        let [plain, tuned, ours, whole, forced] =
            [0, 1, 2, 3, 4].map(|series| median(connections.iter().map(|(r, _)| r[series]).collect()));
        let (kib, lanes) = (size >> 10, &connections[0].1);
        let figures = [
            (
                "",
                ours,
                ours / tuned,
                format!("bare UCX puts at {tuned:.3} GB/s over {lanes}; offer to adoption {whole:.3} GB/s"),
            ),
            ("_defaults", ours, ours / plain, format!("bare UCX puts with UCX's own settings, {plain:.3} GB/s")),
            ("_one_sided", forced, forced / tuned, format!("the same bare UCX puts, {tuned:.3} GB/s")),
        ];
        for (suffix, value, ratio, of) in figures {
            println!(
                r#"{{"name":"kv_put_{kib}kib{suffix}","value":{value:.3},"unit":"GB/s","ratio":{ratio:.3},"of":"{of}"}}"#
            );
        }
    }
    // The shape of SmolLM2-135M: 12 KiB a block and layer.
    let mut service = ServiceLoop::start(tls, UcxWrites::ByLanes, 12 << 10)?;
    service.round(12 << 10)?;
    let exposed = (0..5 * ROUNDS).map(|_| service.exposed_ms()).collect::<Result<Vec<_>>>()?;
    let exposed = median(exposed);
    println!(
        r#"{{"name":"kv_last_layer_exposed","value":{exposed:.3},"unit":"ms","ratio":null,"of":"1,024 tokens, 768 KiB"}}"#
    );
    service.stop()?;
    let map = map(12 << 10)?;
    let region = trial::touched(map.bytes())?;
    let checksum = baton_kv_transfer::bench::checksum_rate(&map, &region);
    println!(r#"{{"name":"kv_checksum","value":{checksum:.3},"unit":"GB/s","ratio":null,"of":"one thread"}}"#);
    Ok(())
}
