//! Calls from routers to workers: simulated gRPC streams, with delays, broken connections and unresponsive peers.
//!
//! A call runs the worker's service in the worker's process. The service's events travel one at a time. When either end drops the stream,
//! the other end notices a little later.

use crate::executor::{Executor, Process, Time, ms};
use crate::network::Network;
use baton_router::port::{CallError, WorkerEvents};
use baton_types::{BoxFuture, ErrorKind, RequestError};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Time, with some jitter, after which a caller counts a stalled worker as gone.
const SILENT: Time = ms(450);

/// A service's answers. Dropping it cancels the call there.
pub type Answers<T> = BoxStream<'static, Result<T, RequestError>>;

/// All calls of one schedule. Clones share them.
#[derive(Clone)]
pub struct Calls {
    executor: Executor,
    network: Network,
    /// One-way delay of a call, an event, or the end of either; the same as that of the network's messages if absent.
    half_trip: Option<Time>,
    open: Arc<Mutex<Vec<Open>>>,
}

/// One open call.
struct Open {
    ends: [Process; 2],
    /// Cancelled to notify the caller, and then the worker, that the other side is gone.
    broken: [CancellationToken; 2],
}

fn gone() -> CallError {
    CallError::Lost(RequestError::new(ErrorKind::Unavailable, "the worker is gone or cannot be reached"))
}

impl Calls {
    /// No calls yet. The one-way delay is `half_trip`, or that of messages of `network`.
    pub fn new(executor: Executor, network: Network, half_trip: Option<Time>) -> Self {
        Self { executor, network, half_trip, open: Arc::default() }
    }

    /// Calls the service of `worker` from `caller`. `serve` runs in the worker's process and returns its stream of events.
    pub fn call<T, F>(
        &self,
        caller: Process,
        worker: Process,
        serve: impl FnOnce() -> F + Send + 'static,
    ) -> BoxFuture<'static, Result<WorkerEvents<T>, CallError>>
    where
        T: Send + 'static,
        F: Future<Output = Result<Answers<T>, RequestError>> + Send + 'static,
    {
        let calls = self.clone();
        let [caller_hears, worker_hears] = [(); 2].map(|()| CancellationToken::new());
        let open = Open { ends: [caller, worker], broken: [caller_hears.clone(), worker_hears.clone()] };
        self.open.lock().push(open);
        Box::pin(async move {
            let (opened, answer) = oneshot::channel();
            let (said, stream) = mpsc::channel(1);
            calls.executor.spawn(Process::WORLD, calls.clone().carry(worker, serve, opened, said, worker_hears));
            tokio::select! {
                biased;
                () = caller_hears.cancelled() => return Err(gone()),
                answer = answer => answer.unwrap_or_else(|_| Err(gone()))?,
            }
            let events =
                futures::stream::unfold((stream, caller_hears, false), |(mut stream, broken, ended)| async move {
                    if ended {
                        return None;
                    }
                    let (event, ends) = tokio::select! {
                        biased;
                        event = stream.recv() => (event?, false),
                        () = broken.cancelled() => (Err(gone()), true),
                    };
                    Some((event, (stream, broken, ends)))
                });
            Ok(events.boxed())
        })
    }

    /// Carries one call to the worker and its answers back.
    async fn carry<T, F>(
        self,
        worker: Process,
        serve: impl FnOnce() -> F + Send + 'static,
        opened: oneshot::Sender<Result<(), CallError>>,
        said: mpsc::Sender<Result<T, CallError>>,
        broken: CancellationToken,
    ) where
        T: Send + 'static,
        F: Future<Output = Result<Answers<T>, RequestError>> + Send + 'static,
    {
        self.travel().await;
        if self.executor.is_dead(worker) {
            drop(opened.send(Err(gone())));
            return;
        }
        let (answers, answered) = oneshot::channel();
        self.executor.spawn(worker, async move {
            let answer = serve().await;
            drop(answers.send(answer));
        });
        let answer = tokio::select! {
            biased;
            () = broken.cancelled() => return,
            // Dropped with its process: the caller notices that later.
            answer = answered => match answer { Ok(answer) => answer, Err(_) => return broken.cancelled().await },
        };
        self.travel().await;
        let mut answers = match answer {
            Ok(answers) => answers,
            Err(refused) => return drop(opened.send(Err(CallError::Refused(refused)))),
        };
        if opened.send(Ok(())).is_err() {
            return;
        }
        loop {
            let event = tokio::select! {
                biased;
                () = broken.cancelled() => return,
                () = said.closed() => break,
                event = answers.next() => event,
            };
            let Some(event) = event else {
                // A dead worker sends nothing; a live one has ended its stream.
                if self.executor.is_dead(worker) {
                    broken.cancelled().await;
                }
                break;
            };
            self.travel().await;
            if said.send(event.map_err(CallError::Refused)).await.is_err() {
                break;
            }
        }
        // The other end notices a little later.
        self.travel().await;
    }

    async fn travel(&self) {
        let at = self.executor.instant(self.executor.time() + self.half_trip.unwrap_or_else(|| self.network.delay()));
        self.executor.runtime(Process::WORLD).sleep_until(at).await;
    }

    /// Ends the calls of a dead process: the other ends notice soon, or by a timeout if `silent`.
    pub fn died(&self, process: Process, silent: bool) {
        let mut open = self.open.lock();
        open.retain(|call| call.broken.iter().any(|token| !token.is_cancelled()));
        for call in open.iter().filter(|call| call.ends.contains(&process)) {
            let soon = if silent { ms(500) } else { ms(20) };
            let at = self.executor.time() + self.executor.draw(|random| random.below(soon));
            self.breaks(at, call);
        }
    }

    /// Breaks the calls of a stalled process, unless it `is_back` by then.
    pub fn silent(&self, process: Process, is_back: impl Fn() -> bool + Send + Sync + Clone + 'static) {
        for call in self.open.lock().iter().filter(|call| call.ends.contains(&process)) {
            let at = self.executor.time() + SILENT + self.executor.draw(|random| random.below(ms(200)));
            let (broken, is_back) = (call.broken.clone(), is_back.clone());
            self.executor.call(at, Process::WORLD, move || {
                if !is_back() {
                    broken.iter().for_each(CancellationToken::cancel);
                }
            });
        }
    }

    fn breaks(&self, at: Time, call: &Open) {
        let broken = call.broken.clone();
        self.executor.call(at, Process::WORLD, move || broken.iter().for_each(CancellationToken::cancel));
    }
}
