//! Shutdown of a process: a first signal drains it; a second one, or the loss of its parent, shortens the drain. Every
//! wait is bounded.

use crate::config::{Check, Checker};
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::io::Read;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Time limits of the drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DrainConfig {
    /// Longest drain after SIGTERM or SIGINT: requests in flight may end within it.
    pub drain_ms_max: u64,
    /// Longest drain after a second signal, or after standard input ended; at most `drain_ms_max`.
    pub drain_quick_ms_max: u64,
    /// A worker that `baton drain` drained, and that was not restarted for this long, fails its liveness probe, so that
    /// its supervisor restarts it; 0: never. Routers ignore it.
    pub drained_ms_max: u64,
    /// Stop when standard input ends: the process that holds its other end is gone.
    pub stop_with_stdin: bool,
}

impl Default for DrainConfig {
    fn default() -> Self {
        // Kubernetes kills 30 s after SIGTERM; leave time to flush traces.
        let drained_ms_max = 600_000;
        Self { drain_ms_max: 25_000, drain_quick_ms_max: 1_000, drained_ms_max, stop_with_stdin: false }
    }
}

impl Check for DrainConfig {
    fn check(&self, at: &mut Checker) {
        at.range("drain_ms_max", self.drain_ms_max, 0..=3_600_000);
        at.range("drain_quick_ms_max", self.drain_quick_ms_max, 0..=3_600_000);
        at.range("drained_ms_max", self.drained_ms_max, 0..=7 * 24 * 3_600_000);
    }
}

/// The stop request, shared by all tasks of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct Shutdown {
    requested: CancellationToken,
    quick: CancellationToken,
    drain: Duration,
    drain_quick: Duration,
}

impl Shutdown {
    /// Without signals: for tests, and for processes that embed another.
    pub fn new(config: &DrainConfig) -> Self {
        Self {
            requested: CancellationToken::new(),
            quick: CancellationToken::new(),
            drain: Duration::from_millis(config.drain_ms_max),
            drain_quick: Duration::from_millis(config.drain_quick_ms_max.min(config.drain_ms_max)),
        }
    }

    /// Listens to SIGTERM and SIGINT and, where configured, to the end of standard input.
    ///
    /// # Errors
    /// If the signal handlers cannot be installed.
    pub fn install(config: &DrainConfig) -> std::io::Result<Self> {
        let shutdown = Self::new(config);
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::spawn({
            let shutdown = shutdown.clone();
            async move {
                for _ in 0..2 {
                    let name = tokio::select! {
                        _ = terminate.recv() => "SIGTERM",
                        _ = interrupt.recv() => "SIGINT",
                    };
                    if shutdown.is_requested() {
                        shutdown.hurry(name);
                    } else {
                        shutdown.request(name);
                    }
                }
            }
        });
        if config.stop_with_stdin {
            let shutdown = shutdown.clone();
            // A thread, not a task: a blocked read would delay the end of the runtime, but not the end of the process.
            std::thread::Builder::new().name("baton-stdin".into()).spawn(move || {
                wait_for_end(std::io::stdin().lock());
                shutdown.hurry("end of standard input");
            })?;
        }
        Ok(shutdown)
    }

    /// Starts the drain, unless it has begun; `why` is logged.
    pub fn request(&self, why: &str) {
        if !self.requested.is_cancelled() {
            tracing::info!(why, drain_ms_max = self.drain.as_millis() as u64, "drains and stops");
            self.requested.cancel();
        }
    }

    /// Starts the drain, or makes a running one quick.
    pub fn hurry(&self, why: &str) {
        if !self.quick.is_cancelled() {
            tracing::info!(why, drain_ms_max = self.drain_quick.as_millis() as u64, "stops quickly");
            self.quick.cancel();
            self.requested.cancel();
        }
    }

    /// Whether the drain has started.
    pub fn is_requested(&self) -> bool {
        self.requested.is_cancelled()
    }

    /// Cancelled when the drain starts.
    pub fn token(&self) -> CancellationToken {
        self.requested.clone()
    }

    /// Waits for the drain to start.
    pub async fn requested(&self) {
        self.requested.cancelled().await;
    }

    /// Runs `work`, the rest of what is in flight, for at most the configured drain time; a second signal shortens it.
    /// `None` if `work` did not end in time and was dropped. Call it after the drain was requested.
    pub async fn drain<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let hurried = async {
            self.quick.cancelled().await;
            tokio::time::sleep(self.drain_quick).await;
        };
        tokio::select! {
            biased;
            done = work => Some(done),
            () = tokio::time::sleep_until(Instant::now() + self.drain) => None,
            () = hurried => None,
        }
    }
}

/// Reads and discards until the end; a read error also counts as the end.
fn wait_for_end(mut input: impl Read) {
    let mut buffer = [0; 256];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return,
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    fn config() -> DrainConfig {
        DrainConfig { drain_ms_max: 10_000, drain_quick_ms_max: 500, ..DrainConfig::default() }
    }

    async fn drained_after(shutdown: &Shutdown, work: impl Future<Output = ()>) -> (bool, u128) {
        let start = Instant::now();
        let done = shutdown.drain(work).await.is_some();
        (done, start.elapsed().as_millis())
    }

    // Under paused time the clock advances only when all tasks wait, so these durations are exact.
    #[tokio::test(start_paused = true)]
    async fn drains_are_bounded() {
        let shutdown = Shutdown::new(&config());
        assert!(!shutdown.is_requested());
        shutdown.request("test");
        shutdown.requested().await;
        assert_eq!(drained_after(&shutdown, async {}).await, (true, 0));
        assert_eq!(drained_after(&shutdown, tokio::time::sleep(Duration::from_millis(7_000))).await, (true, 7_000));
        assert_eq!(drained_after(&shutdown, pending()).await, (false, 10_000));
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_wish_shortens_a_running_drain() {
        let shutdown = Shutdown::new(&config());
        shutdown.request("test");
        let second = shutdown.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(2_000)).await;
            second.hurry("test");
        });
        assert_eq!(drained_after(&shutdown, pending()).await, (false, 2_500));
        // From then on every drain is quick. A shortened stop is also a requested one.
        assert_eq!(drained_after(&shutdown, pending()).await, (false, 500));
        assert!(shutdown.token().is_cancelled());
    }

    #[test]
    fn the_end_of_an_input_is_noticed_behind_any_bytes() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let waits = std::thread::spawn(move || wait_for_end(reader));
        std::io::Write::write_all(&mut writer, &[b'x'; 1000]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished());
        drop(writer);
        waits.join().unwrap();
    }
}
