//! Puts of 6, 48 and 384 KiB between two processes on this host: TCP of our own, plain and in TLS, UCX over shared memory, and over forced
//! TCP beside a bare loop of its puts.
//!
//! `cargo run --release --example put_bench [-- SIZE_KIB...]` prints one JSON object a line: `name`, `value`, `unit`, `ratio`, `of`.

#[allow(dead_code, unreachable_pub)]
#[path = "../tests/common/authority.rs"]
mod authority;

use anyhow::{Context, Result, bail};
use authority::Authority;
use baton_kv_transfer::bench::{Bare, Card, Tuning};
use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::{Dtype, Fence, InstanceId, KvLayout, KvPoolMap};
use rcgen::KeyPair;
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

/// The lanes of the bare loop.
const BARE_TLS: &str = "tcp";

/// How a service's KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tcp,
    /// With all in TLS.
    Tls,
    /// With all but KV in TLS.
    TlsControl,
    /// Over forced TCP, by messages.
    Ucx,
    /// The same by UCX's puts.
    UcxOneSided,
    /// Over shared memory, with messages in TLS.
    SharedMemory,
}

impl Way {
    const ALL: [Self; 6] = [Self::Tcp, Self::Tls, Self::TlsControl, Self::Ucx, Self::UcxOneSided, Self::SharedMemory];

    fn named(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|way| format!("{way:?}") == name).with_context(|| format!("no way {name}"))
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Tcp => "",
            Self::Tls => "_tls",
            Self::TlsControl => "_tls_control",
            Self::Ucx => "_ucx_tcp",
            Self::UcxOneSided => "_ucx_tcp_one_sided",
            Self::SharedMemory => "_ucx_shared_memory",
        }
    }

    fn choice(self) -> TransportChoice {
        let bind = [127, 0, 0, 1].into();
        match self {
            Self::Tcp | Self::Tls | Self::TlsControl => TransportChoice::tcp(bind),
            Self::Ucx => TransportChoice::ucx(UcxLanes::LoopbackTcp, bind),
            Self::SharedMemory => TransportChoice::ucx(UcxLanes::SharedMemory, bind),
            Self::UcxOneSided => {
                let (lanes, writes) = (UcxLanes::LoopbackTcp, UcxWrites::OneSided);
                TransportChoice::Ucx { lanes, bind, port: 0, devices: None, writes }
            }
        }
    }

    const fn is_secured(self) -> bool {
        matches!(self, Self::Tls | Self::TlsControl | Self::SharedMemory)
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [] => source(&SIZES),
        ["sink-bare", tuning] => sink_bare(tuning_of(tuning)?),
        ["sink-service", way, size, ref key @ ..] => {
            let pem = key.first().map(|key| unhex(key)).transpose()?;
            let key = pem.map(|pem| anyhow::Ok(KeyPair::from_pem(&String::from_utf8(pem)?)?)).transpose()?;
            sink_service(Way::named(way)?, size.parse()?, key.map(Authority::with_key).as_ref())
        }
        ref sizes => source(&sizes.iter().map(|kib| Ok(kib.parse::<usize>()? << 10)).collect::<Result<Vec<_>>>()?),
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

fn sink_bare(tuning: Tuning) -> Result<()> {
    let mut bare = Bare::start(BARE_TLS, tuning, ROUND_BYTES).map_err(anyhow::Error::msg)?;
    let Card { address, key, base } = bare.card().map_err(anyhow::Error::msg)?;
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

fn trial(name: &str, way: Way, map: KvPoolMap, authority: Option<&Authority>) -> Result<Trial> {
    let mut config = Trial::config(InstanceId::try_new(name)?, way.choice(), map);
    config.limits.in_flight_bytes_max = WINDOW;
    config.encrypt = way != Way::TlsControl;
    config.credentials = authority.map(|authority| authority.worker() as Arc<dyn Credentials>);
    Ok(Trial::start(config)?)
}

fn sink_service(way: Way, size: usize, authority: Option<&Authority>) -> Result<()> {
    let trial = trial("sink", way, map(size)?, authority)?;
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
}

impl BareLoop {
    fn start(tuning: Tuning, size: usize) -> Result<Self> {
        let (sink, card) = spawn(&["sink-bare", &format!("{tuning:?}")])?;
        let [address, key, base] = card.split(' ').collect::<Vec<_>>()[..] else {
            bail!("no card from the sink: {card:?}")
        };
        let mut bare = Bare::start(BARE_TLS, tuning, ROUND_BYTES).map_err(anyhow::Error::msg)?;
        let card = Card { address: unhex(address)?, key: unhex(key)?, base: base.parse()? };
        bare.connect(&card).map_err(anyhow::Error::msg)?;
        bare.put(size, 4 << 20, WINDOW); // Wires the lanes up.
        Ok(Self { bare, sink })
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
    fn start(way: Way, size: usize) -> Result<Self> {
        let authority = way.is_secured().then(Authority::new);
        let key = authority.as_ref().map(|authority| hex(authority.key().serialize_pem().as_bytes()));
        let (name, size_text) = (format!("{way:?}"), size.to_string());
        let args = ["sink-service", &name, &size_text].into_iter().chain(key.as_deref());
        let (sink, address) = spawn(&args.collect::<Vec<_>>())?;
        let map = map(size)?;
        let peer = Trial::peer(InstanceId::try_new("sink")?, TransferAddress::from_bytes(&unhex(&address)?)?);
        Ok(Self { trial: trial("source", way, map.clone(), authority.as_ref())?, sink, peer, map })
    }

    /// Milliseconds from the end of compute to adoption, when everything but the last layer is there: what no overlap can hide.
    fn exposed_ms(&mut self) -> Result<f64> {
        let tokens = 1024.min(self.trial.tokens_max());
        let fence: Fence = Arc::new(AlreadyDone);
        let put = self.trial.open(&self.peer, tokens)?;
        (0..LAYERS - 1).for_each(|layer| put.layer_launched(layer, tokens as usize, &fence));
        let all = self.map.layout().bytes_per_token() as u64 * u64::from(tokens);
        let sent = || self.trial.transfer().stats().total.bytes_put;
        let (before, until) = (sent(), Instant::now() + Duration::from_secs(5));
        while sent() < before + all / 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        let end = Instant::now();
        put.layer_launched(LAYERS - 1, tokens as usize, &fence);
        trial::finish(&put, tokens);
        let report = put.wait()?;
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

/// Rates on fresh connections: of each way of the service, by its writes and by whole handoffs, and of the bare loops.
struct Rates {
    services: Vec<(f64, f64)>,
    bare: f64,
    bare_defaults: f64,
}

fn connection(size: usize) -> Result<Rates> {
    let (bare, tuned) = (BareLoop::start(Tuning::Defaults, size)?, BareLoop::start(Tuning::Ours, size)?);
    let mut services = Way::ALL.into_iter().map(|way| ServiceLoop::start(way, size)).collect::<Result<Vec<_>>>()?;
    services.iter_mut().try_for_each(|service| service.round(size).map(drop))?; // Connects.
    let mut rates = Rates { services: vec![(0.0, 0.0); services.len()], bare: 0.0, bare_defaults: 0.0 };
    for _ in 0..ROUNDS {
        rates.bare_defaults = rates.bare_defaults.max(bare.round(size));
        rates.bare = rates.bare.max(tuned.round(size));
        // The largest: whatever else runs can only take away from a rate.
        for (service, best) in services.iter_mut().zip(&mut rates.services) {
            let (puts, whole) = service.round(size)?;
            *best = (best.0.max(puts), best.1.max(whole));
        }
    }
    bare.stop()?;
    tuned.stop()?;
    services.into_iter().try_for_each(ServiceLoop::stop)?;
    Ok(rates)
}

fn say(name: &str, value: f64, unit: &str, ratio: Option<f64>, of: &str) {
    let ratio = ratio.map_or("null".into(), |ratio| format!("{ratio:.3}"));
    println!(r#"{{"name":"{name}","value":{value:.3},"unit":"{unit}","ratio":{ratio},"of":"{of}"}}"#);
}

fn source(sizes: &[usize]) -> Result<()> {
    for &size in sizes {
        let connections = (0..CONNECTIONS).map(|_| connection(size)).collect::<Result<Vec<_>>>()?;
        let of = |rate: &dyn Fn(&Rates) -> f64| median(connections.iter().map(rate).collect());
        let puts = |way: Way| of(&|rates| rates.services[way as usize].0);
        let whole = |way: Way| of(&|rates| rates.services[way as usize].1);
        let (kib, tcp, ucx, bare) = (size >> 10, puts(Way::Tcp), puts(Way::Ucx), of(&|rates| rates.bare));
        let name = |suffix: &str| format!("kv_put_{kib}kib{suffix}");
        let told = format!("UCX over TCP at {ucx:.3} GB/s; offer to adoption {:.3} GB/s", whole(Way::Tcp));
        say(&name(""), tcp, "GB/s", Some(tcp / ucx), &told);
        for way in Way::ALL.into_iter().filter(|way| *way != Way::Tcp) {
            let told = format!("plain TCP at {tcp:.3} GB/s; offer to adoption {:.3} GB/s", whole(way));
            say(&name(way.suffix()), puts(way), "GB/s", Some(puts(way) / tcp), &told);
        }
        say(&name("_bare"), bare, "GB/s", Some(bare / tcp), &format!("plain TCP at {tcp:.3} GB/s; no service"));
        let defaults = of(&|rates| rates.bare_defaults);
        say(&name("_bare_defaults"), defaults, "GB/s", Some(defaults / tcp), "the same; UCX's own settings");
    }
    // The shape of SmolLM2-135M: 12 KiB a block and layer.
    for way in [Way::Tcp, Way::Tls, Way::SharedMemory] {
        let mut service = ServiceLoop::start(way, 12 << 10)?;
        service.round(12 << 10)?;
        let exposed = (0..5 * ROUNDS).map(|_| service.exposed_ms()).collect::<Result<Vec<_>>>()?;
        let name = format!("kv_last_layer_exposed{}", way.suffix());
        say(&name, median(exposed), "ms", None, "1,024 tokens, 768 KiB");
        service.stop()?;
    }
    let map = map(12 << 10)?;
    let region = trial::touched(map.bytes())?;
    say("kv_checksum", baton_kv_transfer::bench::checksum_rate(&map, &region), "GB/s", None, "one thread");
    Ok(())
}
