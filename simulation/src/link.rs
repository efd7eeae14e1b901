//! Connects a simulated router with simulated workers: implements the router's port over [`Calls`].

use crate::calls::{Answers, Calls};
use crate::counts::Counting;
use crate::executor::Process;
use crate::worker::SimulatedWorker;
use baton_decode_worker::simulation::DecodeRequest;
use baton_kv_cache::FeedChange;
use baton_kv_transfer::{Peer, TransferAddress};
use baton_node::telemetry::TraceId;
use baton_prefill_worker::simulation::PrefillRequest;
use baton_router::port::{
    CacheReport, CacheReportChange, CallError, ConnectError, Connector, DecodeCall, Link, PrefillCall, WorkerEvents,
    WorkerReport,
};
use baton_types::{BoxFuture, DecodeEvent, Digest, ErrorKind, InstanceRecord, Party, PrefillEvent, RequestError};
use baton_worker::prefix_get::PrefixGet;
use baton_worker::report::Report;
use futures::{FutureExt as _, StreamExt as _};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use tokio_stream::wrappers::ReceiverStream;

/// Which worker serves which endpoint now. Clones share it.
#[derive(Clone, Default)]
pub struct Directory(Arc<Mutex<BTreeMap<String, SimulatedWorker>>>);

impl Directory {
    /// A worker starts to listen.
    pub fn listens(&self, worker: SimulatedWorker) {
        let before = self.0.lock().insert(worker.record.endpoint.clone(), worker);
        drop(before);
    }

    /// The worker that listens at an endpoint.
    pub fn at(&self, endpoint: &str) -> Option<SimulatedWorker> {
        self.0.lock().get(endpoint).cloned()
    }

    /// All workers that listen.
    pub fn all(&self) -> Vec<SimulatedWorker> {
        self.0.lock().values().cloned().collect()
    }

    /// Removes all workers.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }
}

/// The links of one router.
#[derive(Clone)]
pub struct Links {
    /// The router's process.
    pub router: Process,
    /// Carries the calls.
    pub calls: Calls,
    /// The workers that serve the calls.
    pub directory: Directory,
    /// Counts events.
    pub counts: Counting,
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Links").field(&self.router).finish()
    }
}

impl Connector for Links {
    fn connect(&self, record: &InstanceRecord) -> Result<Box<dyn Link>, ConnectError> {
        Ok(Box::new(ToWorker { links: self.clone(), endpoint: record.endpoint.clone(), party: record.party.clone() }))
    }
}

/// A link to the worker at an endpoint, for one start of that worker.
#[derive(Debug)]
struct ToWorker {
    links: Links,
    endpoint: String,
    party: Party,
}

impl ToWorker {
    /// Calls the worker that listens there now.
    fn call<T: Send + 'static>(
        &self,
        serve: impl FnOnce(&SimulatedWorker) -> Result<Answers<T>, RequestError> + Send + 'static,
    ) -> BoxFuture<'static, Result<WorkerEvents<T>, CallError>> {
        let Some(worker) = self.links.directory.at(&self.endpoint) else {
            let gone = RequestError::new(ErrorKind::Unavailable, "nobody listens there");
            return async { Err(CallError::Lost(gone)) }.boxed();
        };
        let process = worker.process;
        self.links.calls.call(self.links.router, process, move || async move { serve(&worker) })
    }
}

impl Link for ToWorker {
    fn decode(&self, call: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>> {
        self.links.counts.lock().add("router: attempts", 1);
        let (party, deadline) = (self.party.clone(), call.deadline);
        let request = DecodeRequest { sequence: call.sequence, source: call.source.cloned() };
        self.call(move |worker| Ok(ReceiverStream::new(worker.decode(&party, deadline, request)?).boxed()))
    }

    fn prefill(&self, call: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>> {
        let (party, deadline, sink) = (self.party.clone(), call.deadline, call.sink);
        let address = TransferAddress::from_bytes(&sink.shards[0].transfer_address).expect("an address of a worker");
        let peer = Peer { party: sink.party.clone(), address, shard: 0 };
        let get = (call.get_to_tokens > 0).then(|| {
            PrefixGet::try_new(peer.clone(), call.get_to_tokens as u32, sink.layout.block_tokens())
                .expect("blocks of a layout")
        });
        let request = PrefillRequest { sequence: call.sequence, peer, get };
        self.call(move |worker| Ok(ReceiverStream::new(worker.prefill(&party, deadline, request)?).boxed()))
    }

    fn watch(&self, _: &str, cache: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>> {
        let meant = self.party.clone();
        self.call(move |worker| {
            let is_meant = *worker.party() == meant;
            let report = move |report| Ok(if is_meant { as_heard(report) } else { WorkerReport::AnotherProcess });
            Ok(ReceiverStream::new(worker.reports(cache)).map(report).boxed())
        })
    }

    fn bundle(&self, _: Digest, _: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>> {
        let none = RequestError::new(ErrorKind::Unsupported, "the model has no text");
        async { Err(CallError::Refused(none)) }.boxed()
    }

    fn keep(&self, _: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>> {
        async { Ok(()) }.boxed()
    }
}

/// A worker's report as its router receives it.
fn as_heard(report: Report) -> WorkerReport {
    let update = match report {
        Report::Load(load) => return WorkerReport::Load(load),
        Report::Cache(update) => update,
        Report::Adapters(cards) => return WorkerReport::Adapters(Ok(cards.to_vec())),
    };
    let (change, blocks) = match update.change {
        FeedChange::Stored(blocks) => (CacheReportChange::Stored, blocks),
        FeedChange::Removed(blocks) => (CacheReportChange::Removed, blocks),
        FeedChange::Snapshot { part, last, blocks } => (CacheReportChange::Snapshot { part, last }, blocks),
    };
    WorkerReport::Cache(Ok(CacheReport { sequence: update.sequence, change, blocks }))
}
