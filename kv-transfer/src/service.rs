//! The service: a driver on its own thread, and the handle of its callers.

use crate::calls::CallThread;
use crate::driver::{Driver, Ports};
use crate::handler::SinkHandler;
use crate::inbox::{Command, Inbox};
use crate::plan::{check_begin, check_blocks, check_from, got_from};
use crate::pool_turns::SharedPoolMemory;
use crate::transport;
use crate::verify::VerifierThread;
use crate::{
    GetHandle, GetRequest, Party, Peer, PutHandle, PutRequest, TransferAddress, TransferConfig, TransferError,
    TransferStats, TransportChoice,
};
use baton_memory::PoolMemory;
use baton_types::RequestId;
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Cloneable handle of a running transfer service. The service stops with [`KvTransfer::stop`], or when the last handle is dropped; a
/// [`SinkHandler`] that keeps a handle keeps the service alive until `stop`.
#[derive(Clone)]
pub struct KvTransfer {
    shared: Arc<Shared>,
}

struct Shared {
    inbox: Arc<Inbox>,
    address: TransferAddress,
    fences: bool,
    config: TransferConfig,
    stats: Arc<Mutex<TransferStats>>,
    /// `None` once they were joined, and where the caller runs the driver.
    threads: Mutex<Option<Threads>>,
}

struct Threads {
    progress: JoinHandle<()>,
    /// The thread that calls the worker's handler; it ends before the progress thread.
    calls: ThreadId,
}

impl KvTransfer {
    /// Starts the transport over the pool's memory and starts the progress thread. Waits until the thread runs, or has failed to.
    pub fn start(
        config: TransferConfig,
        memory: Arc<dyn PoolMemory>,
        handler: Arc<dyn SinkHandler>,
    ) -> Result<Self, TransferError> {
        if memory.bytes() < config.map.bytes() {
            let (memory, pool) = (memory.bytes(), config.map.bytes());
            return Err(TransferError::Config(format!("memory of {memory} bytes cannot hold a pool of {pool}")));
        }
        let choice = config.transport.clone();
        let failed = |detail| TransferError::Transport { transport: name(&choice), detail };
        let (started, start) = mpsc::sync_channel(1);
        // The transport is created on the thread that will own it.
        let body = move || {
            let spin = Duration::from_micros(config.limits.spin_us);
            let abort = config.limits.abort();
            let service = ports(&config, memory, handler);
            match service.and_then(|(ports, calls)| Ok((Self::drive(config, ports)?, calls))) {
                Ok(((handle, driver), calls)) => {
                    started.send(Ok((handle, calls))).ok();
                    run(driver, spin, abort);
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let progress =
            std::thread::Builder::new().name("kv-progress".into()).spawn(body).map_err(|e| failed(e.to_string()))?;
        let (handle, calls) = start.recv().map_err(|_| failed("its thread died".into()))??;
        *handle.shared.threads.lock() = Some(Threads { progress, calls });
        Ok(handle)
    }

    /// A service whose driver the caller runs over its own ports, as [`KvTransfer::start`] does on a thread. For simulations.
    #[doc(hidden)]
    pub fn drive(config: TransferConfig, ports: Ports) -> Result<(Self, Driver), TransferError> {
        config.limits.check()?;
        let refused = match config.shard.part(&config.compatibility.layout) {
            Some(part) if part == *config.map.layout() => None,
            Some(_) => Some("the pool's layout is not the shard's part of that of the compatibility fingerprint"),
            None => Some(
                "the layout cannot be split into these shards: their number divides not all heads, or there are states",
            ),
        };
        if let Some(why) = refused {
            return Err(TransferError::Config(why.into()));
        }
        let driver = Driver::new(config.clone(), ports)?;
        let shared = Shared {
            inbox: driver.inbox().clone(),
            address: driver.transport().address(),
            fences: driver.transport().fences(),
            config,
            stats: driver.published().clone(),
            threads: Mutex::new(None),
        };
        Ok((Self { shared: Arc::new(shared) }, driver))
    }

    /// The address at which peers reach this service; it belongs in the membership record.
    pub fn address(&self) -> TransferAddress {
        self.shared.address.clone()
    }

    /// Whether closing a connection fences every lane by which a peer could write here. If not, blocks of a lost peer stay quarantined, and
    /// are counted by its instance's name.
    pub fn fences(&self) -> bool {
        self.shared.fences
    }

    /// This instance, as tickets identify it.
    pub fn party(&self) -> &Party {
        &self.shared.config.party
    }

    /// Puts a sequence into blocks that `peer` grants. Returns at once; every later failure appears in the outcome.
    pub fn put(&self, peer: &Peer, request: PutRequest) -> Result<PutHandle, TransferError> {
        if request.tokens == 0 {
            return Err(TransferError::Blocks("a handoff of no tokens".into()));
        }
        check_begin(&self.shared.config.map, &request.blocks, request.tokens).map_err(TransferError::Blocks)?;
        let (sender, outcome) = oneshot::channel();
        let key = self.shared.inbox.put(peer.clone(), request, sender)?;
        Ok(PutHandle::new(self.shared.inbox.clone(), key, outcome))
    }

    /// Gets blocks of `peer` into blocks of this instance. Returns at once; every later failure appears in the outcome.
    ///
    /// # Errors
    /// If the blocks do not fit the positions, no block here begins with the first position, or the limit of open handoffs is reached. A
    /// first position that the peer cannot serve fails the outcome, with [`crate::HandoffFailure::WholeOnly`].
    pub fn get(&self, peer: &Peer, request: GetRequest) -> Result<GetHandle, TransferError> {
        if request.tokens == 0 || request.name.len() > GetRequest::NAME_BYTES_MAX {
            return Err(TransferError::Blocks("a get of no tokens, or with too long a name".into()));
        }
        let (map, from, tokens) = (&self.shared.config.map, request.from, request.tokens);
        check_from(map, from, tokens).map_err(TransferError::Blocks)?;
        let starts = got_from(map.layout(), map.layout(), from, tokens);
        check_blocks(map, &request.blocks, &starts, tokens - from).map_err(TransferError::Blocks)?;
        let (sender, outcome) = oneshot::channel();
        let key = self.shared.inbox.get(peer.clone(), request, sender)?;
        Ok(GetHandle::new(self.shared.inbox.clone(), key, outcome))
    }

    /// The worker no longer wants this request. Handoffs of it that peers began here are aborted, and their blocks are released after a
    /// fence. Blocks that are pinned for gets of peers are released once no posted write reads them.
    pub fn cancel(&self, request_id: &RequestId, reason: impl Into<String>) {
        self.shared.inbox.cancel(request_id, &reason.into());
    }

    /// The process of this incarnation is proven dead (by a pidfd, or because its machine was fenced). Its lanes are drained and closed,
    /// and the blocks that it could have written are released.
    pub fn peer_is_dead(&self, party: &Party) {
        self.shared.inbox.push(Command::PeerDead(party.clone()));
    }

    /// Whether the service works. After a panic on one of its threads every open handoff has failed, new ones are refused, and only a
    /// restart helps.
    pub fn healthy(&self) -> bool {
        !self.shared.inbox.has_failed()
    }

    /// Counters and gauges, at most a few milliseconds old.
    pub fn stats(&self) -> TransferStats {
        self.shared.stats.lock().clone()
    }

    /// Aborts open handoffs, waits until `deadline` for peers to acknowledge, then shuts everything down. Blocks until that is done, so
    /// call it from a blocking task in an async runtime. Later calls return at once.
    pub fn stop(&self, deadline: Instant) {
        self.shared.stop(deadline);
    }
}

impl Shared {
    fn stop(&self, deadline: Instant) {
        self.inbox.push(Command::Stop(deadline));
        let (threads, here) = (self.threads.lock().take(), std::thread::current().id());
        // A handler that drops the last handle does so on one of these threads, which cannot join itself.
        if let Some(threads) = threads.filter(|t| t.progress.thread().id() != here && t.calls != here) {
            threads.progress.join().ok(); // The panic hook has reported a panic there.
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.threads.get_mut().is_some() {
            self.stop(Instant::now() + self.config.limits.abort().min(Duration::from_secs(1)));
        }
    }
}

impl std::fmt::Debug for KvTransfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvTransfer({} at {})", self.party(), self.shared.address)
    }
}

fn name(choice: &TransportChoice) -> &'static str {
    match choice {
        TransportChoice::Ucx { .. } => "ucx",
        TransportChoice::Tcp { .. } => "tcp",
    }
}

/// The ports of a service, and the thread of its handler.
fn ports(
    config: &TransferConfig,
    memory: Arc<dyn PoolMemory>,
    handler: Arc<dyn SinkHandler>,
) -> Result<(Ports, ThreadId), TransferError> {
    let pool = SharedPoolMemory::new(memory);
    let (transport, wake) = transport::start(config, pool.clone())?;
    let failed =
        |e: std::io::Error| TransferError::Transport { transport: name(&config.transport), detail: e.to_string() };
    let verifier = Box::new(VerifierThread::start(pool, config.map.clone()).map_err(failed)?);
    let (calls, thread) = CallThread::start(handler).map_err(failed)?;
    Ok((Ports { transport, wake, verifier, calls: Box::new(calls), draw: Box::new(rand::random) }, thread))
}

/// Runs the driver until it is stopped, or until a panic here or in the verifier. After a panic every open handoff fails, later calls get
/// an error, and the service is no longer healthy.
fn run(mut driver: Driver, spin: Duration, abort: Duration) {
    let inbox = driver.inbox().clone();
    let turns = AssertUnwindSafe(|| {
        let mut worked_at = Instant::now();
        loop {
            let now = Instant::now();
            let turn = driver.turn(now);
            if turn.over {
                return;
            }
            if turn.worked {
                worked_at = now;
            } else if now - worked_at >= spin {
                driver.sleep(turn.wake_at - now);
            }
        }
    });
    if catch_unwind(turns).is_err() {
        inbox.fail();
    }
    if inbox.has_failed() {
        tracing::error!(?driver, "the transfer service ends after a panic; restart this worker");
    }
    let finish = AssertUnwindSafe(|| {
        let now = Instant::now();
        driver.finish(now, now + abort);
    });
    if catch_unwind(finish).is_err() {
        driver.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Trial;
    use crate::trial::Hold;
    use baton_types::{BlockId, BlockTables, Dtype, GroupBlocks, InstanceId, KvLayout, KvPoolMap, RequestId};

    fn started(name: &str) -> Trial {
        let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap(), 4).unwrap();
        let transport = TransportChoice::tcp([127, 0, 0, 1].into());
        Trial::start(Trial::config(InstanceId::try_new(name).unwrap(), transport, map)).unwrap()
    }

    #[test]
    fn a_service_that_was_stopped_has_not_failed() {
        let trial = started("t");
        trial.transfer().stop(Instant::now() + Duration::from_secs(2));
        assert!(trial.transfer().healthy());
    }

    #[test]
    fn a_get_needs_blocks_of_its_own_pool_for_all_its_positions() {
        let trial = started("t");
        let peer = Trial::peer(InstanceId::try_new("p").unwrap(), trial.address());
        for (blocks, fits) in [(1, false), (2, true), (5, false)] {
            let blocks_of_it = BlockTables::from_start(GroupBlocks(vec![(0..blocks).map(BlockId).collect()]));
            let request = GetRequest {
                request_id: RequestId::try_new("r").unwrap(),
                name: Vec::new(),
                from: 0,
                tokens: 20,
                blocks: blocks_of_it.clone(),
                deadline: Instant::now() + Duration::from_secs(1),
                hold: Box::new(Hold(blocks_of_it)),
            };
            let got = trial.transfer().get(&peer, request);
            assert_eq!(
                matches!(got, Err(TransferError::Blocks(_))),
                !fits,
                "{blocks} blocks for 20 positions: {got:?}"
            );
        }
    }
}
