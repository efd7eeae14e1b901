//! The baseline of `examples/put_bench.rs`: a bare loop of UCX puts over the lanes that the service uses. Not part of the API.

use crate::HeadShard;
use crate::heads::Cut;
use crate::transport::ucx::{Sleeper, TCP_SEGMENTS};
use crate::trial::touched;
use crate::ucx::{Context, Endpoint, Memory, RemoteKey, Worker};
use baton_memory::HostPool;
use std::hint::black_box;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Settings of the bare loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tuning {
    /// UCX's own default settings.
    Defaults,
    /// The settings of the service.
    Ours,
}

/// What a peer needs to write to one side of the bare loop.
pub struct Card {
    /// Address of the UCX worker.
    pub address: Vec<u8>,
    /// Remote key of the region.
    pub key: Vec<u8>,
    /// Address of the region's first byte.
    pub base: u64,
}

/// One side of the bare loop.
pub struct Bare {
    connected: Option<(RemoteKey, u64, Endpoint)>,
    sleeper: Sleeper,
    memory: Rc<Memory>,
    worker: Rc<Worker>,
    base: u64,
}

impl Bare {
    /// Starts a worker on these lanes, with `bytes` of registered memory.
    pub fn start(tls: &str, tuning: Tuning, bytes: usize) -> Result<Self, String> {
        let region = touched(bytes).map_err(|e| e.to_string())?;
        let base = region.base() as u64;
        let more = if tuning == Tuning::Ours { &TCP_SEGMENTS[..] } else { &[] };
        let context =
            Context::new(&[&[("TLS", tls), ("NET_DEVICES", "lo"), ("MM_ERROR_HANDLING", "y")], more].concat())
                .map_err(|e| e.to_string())?;
        let sleeper = Sleeper::new().map_err(|e| e.to_string())?;
        let events = sleeper.events().map_err(|e| e.to_string())?;
        let worker = Worker::new(&context, events, None).map_err(|e| e.to_string())?;
        let memory = Memory::register(&context, region).map_err(|e| e.to_string())?;
        Ok(Self { connected: None, sleeper, memory, worker, base })
    }

    /// The card that the other side needs to connect.
    pub fn card(&self) -> Result<Card, String> {
        let address = self.worker.address().map_err(|e| e.to_string())?;
        Ok(Card { address, key: self.memory.key().map_err(|e| e.to_string())?, base: self.base })
    }

    /// Connects to the other side's card and returns its lanes.
    pub fn connect(&mut self, card: &Card) -> Result<String, String> {
        let endpoint = Endpoint::new(&self.worker, &card.address, 0).map_err(|e| e.to_string())?;
        let key = endpoint.unpack(&card.key).map_err(|e| e.to_string())?;
        let lanes = endpoint.lanes().join(",");
        self.connected = Some((key, card.base, endpoint));
        Ok(lanes)
    }

    /// Accepts the other side's writes until `stop`; sleeps while there are none.
    pub fn serve(&mut self, mut stop: impl FnMut() -> bool) {
        let (spin, mut last) = (Duration::from_micros(20), Instant::now());
        while !stop() {
            if self.worker.progress() {
                last = Instant::now();
            } else if last.elapsed() > spin {
                self.sleeper.sleep(std::iter::once(&*self.worker), Duration::from_millis(5));
            }
        }
    }

    /// Writes `total` bytes in puts of `size`, with at most `window` bytes in flight, and flushes. Returns the time taken.
    pub fn put(&self, size: usize, total: usize, window: usize) -> Duration {
        let Some((key, base, endpoint)) = &self.connected else { return Duration::ZERO };
        let slots = (self.memory_len() / size).max(1);
        let (begin, mut in_flight) = (Instant::now(), 0);
        for i in 0..total / size {
            let at = i % slots * size;
            endpoint.put(self.worker.token(), &self.memory, at, size, base + at as u64, key);
            in_flight += size;
            loop {
                in_flight -= self.worker.take_done().len() * size;
                if in_flight + size <= window {
                    break;
                }
                self.worker.progress();
            }
        }
        while in_flight > 0 {
            self.worker.progress();
            in_flight -= self.worker.take_done().len() * size;
        }
        endpoint.flush(self.worker.token());
        while self.worker.take_done().is_empty() {
            self.worker.progress();
        }
        begin.elapsed()
    }

    fn memory_len(&self) -> usize {
        self.memory.len()
    }
}

/// Rate in GB/s at which checksums over one layer's blocks of a pool are computed; the best of several rounds.
pub fn checksum_rate(map: &baton_types::KvPoolMap, region: &HostPool) -> f64 {
    let blocks = baton_types::BlockTable::from_start((0..map.blocks(0)).map(baton_types::BlockId).collect());
    let tokens = map.blocks(0) * map.layout().block_tokens();
    let bytes = map.layout().groups()[0].token_bytes() * tokens as usize;
    let whole = HeadShard::WHOLE;
    let heads = Cut::new(map.layout(), whole, whole).expect("a whole shares every head with itself").source;
    let once = || {
        let begin = Instant::now();
        black_box(crate::checksum::layer_sums(region, map, &blocks, &heads, 0, 0, 0..tokens)).expect("host memory");
        bytes as f64 / begin.elapsed().as_secs_f64() / 1e9
    };
    (0..9).map(|_| once()).fold(0.0, f64::max)
}
