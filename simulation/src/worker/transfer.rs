//! The shipped driver of transfers, turned in the process of its worker.

use crate::executor::{Executor, Process, Time};
use crate::network::{HeldBlocks, Network};
use baton_kv_transfer::simulation::{Call, Calls, Driver, Job, Ports, Verifier};
use baton_kv_transfer::{KvTransfer, SinkHandler, TransferConfig, TransferError};
use baton_memory::HostPool;
use baton_types::KvPoolMap;
use parking_lot::Mutex;
use send_wrapper::SendWrapper;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// How long things take within a worker.
#[derive(Clone, Copy, Debug)]
pub struct Tempo {
    /// Most that a turn which found something to do takes.
    turn_max: Time,
    /// Most that a checksum or a call of the handler waits for its thread.
    thread_max: Time,
    /// Shortest rest of a driver that is not woken.
    rest_min: Duration,
}

impl Tempo {
    /// Threads wait for their turns, and fences and deadlines are looked at as often as the driver asks for.
    pub const DRAWN: Self = Self { turn_max: 60, thread_max: 400, rest_min: Duration::ZERO };
    /// Nothing waits for a thread. Fences wake the driver, and deadlines, which nothing runs into, are looked at now and then.
    pub const STEADY: Self = Self { turn_max: 1, thread_max: 1, rest_min: Duration::from_millis(100) };
}

/// Where a worker is.
#[allow(missing_docs)] // The types say it.
pub struct Site {
    pub executor: Executor,
    pub network: Network,
    pub process: Process,
    pub address: SocketAddr,
    pub tempo: Tempo,
    /// Wakes the driver.
    pub moved: Arc<Notify>,
}

/// Starts the transfer service of a worker. `held` knows since when blocks of its region are held.
///
/// # Errors
/// As [`KvTransfer::start`], for a configuration that it refuses.
pub fn start(
    site: Site,
    config: TransferConfig,
    region: Arc<HostPool>,
    handler: Arc<dyn SinkHandler>,
    held: Arc<dyn HeldBlocks>,
) -> Result<KvTransfer, TransferError> {
    let Site { executor, network, process, address, tempo, moved } = site;
    let map = config.map.clone();
    let transport = network.join((config.party.clone(), process), address, region.clone(), moved.clone(), held);
    let thread = |executor: &Executor| Thread {
        executor: executor.clone(),
        process,
        longest: tempo.thread_max,
        free_at: Mutex::default(),
    };
    let (wakes, draws) = (moved.clone(), executor.clone());
    let ports = Ports {
        transport: Box::new(transport),
        wake: Box::new(move || wakes.notify_one()),
        verifier: Box::new(OnThread { thread: thread(&executor), does: (region, map) }),
        calls: Box::new(OnThread { thread: thread(&executor), does: handler }),
        draw: Box::new(move || draws.draw(|random| random.any())),
    };
    let abort = Duration::from_millis(config.limits.abort_ms);
    let (service, driver) = KvTransfer::drive(config, ports)?;
    // It stays on its thread, and all tasks of a schedule are polled on one.
    executor.spawn(process, SendWrapper::new(turns(executor.clone(), process, driver, moved, tempo, abort)));
    Ok(service)
}

/// As the progress thread of a service: turns the driver until it is stopped.
async fn turns(
    executor: Executor,
    process: Process,
    mut driver: Driver,
    moved: Arc<Notify>,
    tempo: Tempo,
    abort: Duration,
) {
    let runtime = executor.runtime(process);
    loop {
        let now = runtime.now();
        let turn = driver.turn(now);
        if turn.over {
            return driver.finish(now, now + abort);
        }
        let wakes_at = match turn.worked {
            true => now + Duration::from_micros(executor.draw(|random| 1 + random.below(tempo.turn_max))),
            false if !driver.park() => continue,
            false => turn.wake_at.max(now + tempo.rest_min),
        };
        tokio::select! {
            biased;
            () = moved.notified(), if !turn.worked => {}
            () = runtime.sleep_until(wakes_at) => {}
        }
    }
}

/// A thread of a worker that does one thing after the other.
struct Thread {
    executor: Executor,
    process: Process,
    longest: Time,
    free_at: Mutex<Time>,
}

impl Thread {
    fn does(&self, what: impl FnOnce() + Send + 'static) {
        let mut free_at = self.free_at.lock();
        let begins = self.executor.time().max(*free_at);
        *free_at = begins + 1 + self.executor.draw(|random| random.below(self.longest));
        self.executor.call(*free_at, self.process, what);
    }
}

/// A port of the driver behind a thread.
struct OnThread<T> {
    thread: Thread,
    does: T,
}

impl Verifier for OnThread<(Arc<HostPool>, KvPoolMap)> {
    fn submit(&mut self, job: Job) {
        let (region, map) = self.does.clone();
        self.thread.does(move || job.run(&*region, &map));
    }
}

impl Calls for OnThread<Arc<dyn SinkHandler>> {
    fn submit(&mut self, call: Call) {
        let handler = self.does.clone();
        self.thread.does(move || call.make(&*handler));
    }

    fn joins_legs(&self) -> bool {
        self.does.joins_legs()
    }
}
