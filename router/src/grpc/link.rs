//! Workers over gRPC: the shipped [`Link`].

use crate::port::{
    CacheReport, CacheReportChange, CallError, ConnectError, Connector, DecodeCall, Link, PrefillCall, WorkerEvents,
    WorkerReport,
};
use baton_kv_cache::{FEED_HASHES_MAX, PrefixHash};
use baton_node::grpc::{Channel, ChannelConfig, channel, set_deadline};
use baton_node::identity::{Identity, Role};
use baton_node::telemetry::{TraceId, inject_call};
use baton_proto::convert::ConvertError;
use baton_proto::convert::status::{stated_error, to_error};
use baton_proto::v1::{
    self, cache_update::Change, decode_client::DecodeClient, decode_request::Prefill, prefill_client::PrefillClient,
    telemetry_client::TelemetryClient, worker_client::WorkerClient,
};
use baton_types::{DecodeEvent, Digest, ErrorKind, InstanceRecord, Party, PrefillEvent, RequestError};
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming};

/// A worker that sends no more of a bundle for this long is given up, and another one is asked.
const CHUNK_MAX: Duration = Duration::from_secs(5);
/// The worker pauses once this many bytes wait for a client that does not read: a few hundred tokens.
const STREAM_WINDOW_BYTES: u32 = 16 << 10;

/// Links that authenticate with the router's identity.
#[derive(Clone, Debug)]
pub(crate) struct GrpcConnector {
    identity: Identity,
}

impl GrpcConnector {
    pub(crate) fn new(identity: Identity) -> Self {
        Self { identity }
    }

    /// A separate channel to a worker, for operator calls.
    pub(super) fn channel(&self, worker: &InstanceRecord) -> Result<Channel, ConnectError> {
        let config = ChannelConfig { stream_window_bytes: STREAM_WINDOW_BYTES, ..ChannelConfig::default() };
        channel(&worker.endpoint, &config, &self.identity, Role::Worker).map_err(|e| ConnectError(e.to_string()))
    }
}

impl Connector for GrpcConnector {
    fn connect(&self, record: &InstanceRecord) -> Result<Box<dyn Link>, ConnectError> {
        Ok(Box::new(GrpcLink { channel: self.channel(record)?, party: record.party.clone() }))
    }
}

/// The gRPC connection to one worker.
#[derive(Debug)]
struct GrpcLink {
    channel: Channel,
    party: Party,
}

impl Link for GrpcLink {
    fn decode(&self, call: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>> {
        let prefill = match call.source {
            None => Prefill::Local(v1::LocalPrefill {}),
            Some(source) => Prefill::AwaitKv(v1::AwaitKv { source: Some(source.clone().into()) }),
        };
        let mut request = Request::new(v1::DecodeRequest {
            sequence: Some(call.sequence.into()),
            prefill: Some(prefill),
            party: Some(self.party.clone().into()),
        });
        set_deadline(request.metadata_mut(), call.deadline, Instant::now());
        inject_call(call.spans.call, call.spans.request, request.metadata_mut());
        let mut client = DecodeClient::new(self.channel.clone());
        async move { events(client.generate(request).await) }.boxed()
    }

    fn prefill(&self, call: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>> {
        let (sink, tokens) = (call.sink, call.get_to_tokens);
        let address = sink.shards.first().map(|s| s.transfer_address.clone()).unwrap_or_default();
        let get = (tokens > 0).then(|| v1::GetPrefix {
            owner: Some(sink.party.clone().into()),
            owner_address: address.clone().into(),
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            block_tokens: sink.layout.block_tokens(),
        });
        let mut request = Request::new(v1::PrefillRequest {
            sequence: Some(call.sequence.into()),
            sink: Some(sink.party.clone().into()),
            sink_address: address.into(),
            party: Some(self.party.clone().into()),
            get,
        });
        set_deadline(request.metadata_mut(), call.deadline, Instant::now());
        inject_call(call.spans.call, call.spans.request, request.metadata_mut());
        let mut client = PrefillClient::new(self.channel.clone());
        async move { events(client.run(request).await) }.boxed()
    }

    fn watch(&self, router: &str, cache: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>> {
        let request = v1::WatchRequest { router: router.to_owned(), cache_events: cache, adapters: true };
        let party = self.party.clone();
        let mut client = WorkerClient::new(self.channel.apart());
        async move {
            let reports = client.watch(request).await.map_err(|status| failed(&status))?.into_inner();
            Ok(reports.map(move |report| report.map(|r| worker_report(r, &party)).map_err(|s| failed(&s))).boxed())
        }
        .boxed()
    }

    fn bundle(&self, digest: Digest, bytes_max: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>> {
        let request = v1::BundleRequest { digest: digest.0.to_vec().into() };
        let mut client = WorkerClient::new(self.channel.clone());
        async move {
            let mut chunks = within(CHUNK_MAX, client.bundle(request)).await?.into_inner();
            let mut bytes = Vec::new();
            while bytes.len() <= bytes_max
                && let Some(chunk) = within(CHUNK_MAX, chunks.message()).await?
            {
                bytes.extend_from_slice(&chunk.data);
            }
            Ok(bytes)
        }
        .boxed()
    }

    fn keep(&self, traces: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>> {
        let trace_ids = traces.iter().map(|trace| trace.to_bytes().to_vec().into()).collect();
        let mut client = TelemetryClient::new(self.channel.clone());
        async move { client.keep(v1::KeepRequest { trace_ids }).await.map(drop).map_err(|status| failed(&status)) }
            .boxed()
    }
}

/// The events of an answered call.
fn events<M, E>(answer: Result<Response<Streaming<M>>, Status>) -> Result<WorkerEvents<E>, CallError>
where
    M: Send + 'static,
    E: TryFrom<M, Error = ConvertError> + Send + 'static,
{
    let messages = answer.map_err(|status| failed(&status))?.into_inner();
    let event = |message: Result<M, Status>| {
        let message = message.map_err(|status| failed(&status))?;
        E::try_from(message).map_err(|e| {
            CallError::Lost(RequestError::new(ErrorKind::Internal, format!("it sent an event that is none: {e}")))
        })
    };
    Ok(messages.map(event).boxed())
}

/// The worker's answer, or an error after `most`.
async fn within<T>(most: Duration, answer: impl Future<Output = Result<T, Status>>) -> Result<T, CallError> {
    let silent =
        |_| CallError::Lost(RequestError::new(ErrorKind::Unavailable, format!("the worker sent nothing for {most:?}")));
    timeout(most, answer).await.map_err(silent)?.map_err(|status| failed(&status))
}

/// Whether a status is an error of the worker itself or of the connection.
fn failed(status: &Status) -> CallError {
    match stated_error(status) {
        Some(error) => CallError::Refused(error),
        None => CallError::Lost(to_error(status)),
    }
}

fn worker_report(mut report: v1::LoadReport, party: &Party) -> WorkerReport {
    if report.party.as_ref() != Some(&party.clone().into()) {
        return WorkerReport::AnotherProcess;
    }
    match (&report.cache, report.adapters.take()) {
        (Some(update), _) => WorkerReport::Cache(cache_report(update)),
        (None, Some(adapters)) => WorkerReport::Adapters(adapters.try_into().map_err(|e: ConvertError| e.to_string())),
        (None, None) => WorkerReport::Load(report.into()),
    }
}

/// Converts an update, if it is valid.
fn cache_report(update: &v1::CacheUpdate) -> Result<CacheReport, &'static str> {
    let (change, hashes) = match &update.change {
        Some(Change::Stored(hashes)) => (CacheReportChange::Stored, hashes),
        Some(Change::Removed(hashes)) => (CacheReportChange::Removed, hashes),
        Some(Change::Snapshot(v1::CacheSnapshot { part, last, hashes })) => {
            (CacheReportChange::Snapshot { part: *part, last: *last }, hashes)
        }
        None => return Err("it sent an update of its cache that says nothing known here"),
    };
    let (hashes, rest) = hashes.as_chunks();
    if !rest.is_empty() || hashes.len() > FEED_HASHES_MAX {
        return Err("it sent hashes of cached blocks that are too many, or not whole");
    }
    let blocks = hashes.iter().map(|hash| PrefixHash(*hash)).collect();
    Ok(CacheReport { sequence: update.sequence, change, blocks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_update_of_a_cache_is_none() {
        let of = |change| cache_report(&v1::CacheUpdate { sequence: 3, change });
        let blocks = |bytes: usize| vec![7; bytes].into();
        let snapshot = v1::CacheSnapshot { part: 1, last: true, hashes: blocks(16) };
        let read = CacheReport {
            sequence: 3,
            change: CacheReportChange::Snapshot { part: 1, last: true },
            blocks: vec![PrefixHash([7; 16])],
        };
        assert_eq!(of(Some(Change::Snapshot(snapshot))), Ok(read));
        assert!(of(Some(Change::Stored(blocks(16 * FEED_HASHES_MAX)))).is_ok());
        for change in
            [None, Some(Change::Stored(blocks(17))), Some(Change::Removed(blocks(16 * (FEED_HASHES_MAX + 1))))]
        {
            assert!(of(change).is_err());
        }
    }
}
