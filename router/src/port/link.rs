//! The port to workers: the calls that a router makes to one.

use baton_kv_cache::PrefixHash;
use baton_node::telemetry::TraceId;
use baton_types::{
    AdapterCard, DecodeEvent, Digest, ErrorKind, InstanceRecord, LoadReport, Party, PrefillEvent, RequestError,
    SequenceSpec,
};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use std::fmt::Debug;
use std::time::Instant;
use tracing::Span;

/// Makes links to workers.
pub trait Connector: Debug + Send + Sync {
    /// A link to the worker with this record, which connects when first used.
    ///
    /// # Errors
    /// If its endpoint is not an address.
    fn connect(&self, record: &InstanceRecord) -> Result<Box<dyn Link>, ConnectError>;
}

/// Why no link to a worker can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its endpoint is not an address: {0}")]
pub struct ConnectError(pub String);

/// A link to one incarnation of a worker. Dropping a future or a stream cancels the call on the worker.
pub trait Link: Debug + Send + Sync {
    /// Asks a decode worker to claim capacity for a sequence and to generate. The first event is its claim.
    fn decode(&self, call: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>>;

    /// Asks a prefill worker to run a prompt for a decode worker that has claimed capacity for it.
    fn prefill(&self, call: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>>;

    /// Requests load reports and reports of adapters, and with `cache` also reports of its prefix cache, until the stream is dropped. `router`
    /// names the caller, for logs.
    fn watch(&self, router: &str, cache: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>>;

    /// Requests the bundle of tokenizer and template with this digest: at most `bytes_max` bytes and one chunk more,
    /// unverified.
    fn bundle(&self, digest: Digest, bytes_max: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>>;

    /// Requests the export of all its spans of these traces.
    fn keep(&self, traces: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>>;
}

/// Events of a worker, until it ends the call.
pub type WorkerEvents<T> = BoxStream<'static, Result<T, CallError>>;

/// Why a call failed, as far as the caller's reaction depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The worker itself returned the error.
    Refused(RequestError),
    /// No answer from the worker: it cannot be reached ([`ErrorKind::Unavailable`]), went away, did not answer in time,
    /// or sent something invalid.
    Lost(RequestError),
}

impl CallError {
    /// Whether the worker itself reported that it has no room.
    pub fn is_no_room(&self) -> bool {
        matches!(self, Self::Refused(error) if error.kind == ErrorKind::Overloaded)
    }

    /// The error, whatever its origin.
    pub fn error(&self) -> &RequestError {
        let (Self::Refused(error) | Self::Lost(error)) = self;
        error
    }
}

/// A call to a decode worker.
#[derive(Debug)]
pub struct DecodeCall<'a> {
    /// Prompt, and the answer so far.
    pub sequence: SequenceSpec,
    /// The prefill worker that sends the KV; `None`: the decode worker prefills.
    pub source: Option<&'a Party>,
    /// When the worker may give up.
    pub deadline: Instant,
    pub spans: CallSpans<'a>,
}

/// A call to a prefill worker.
#[derive(Debug)]
pub struct PrefillCall<'a> {
    /// Prompt, and the answer so far.
    pub sequence: SequenceSpec,
    /// The decode worker that holds the claim.
    pub sink: &'a InstanceRecord,
    /// The prompt token up to which the worker gets missing blocks from the sink's cache; 0: no get.
    pub get_to_tokens: u64,
    /// When the worker may give up.
    pub deadline: Instant,
    pub spans: CallSpans<'a>,
}

/// The spans that a call belongs to.
#[derive(Clone, Copy, Debug)]
pub struct CallSpans<'a> {
    pub call: &'a Span,
    pub request: &'a Span,
}

/// A report of a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerReport {
    /// Its load, from the worker that was called.
    Load(LoadReport),
    /// A change of its prefix cache; an error says why the message is not valid.
    Cache(Result<CacheReport, &'static str>),
    /// All its adapters; an error says why the message is not valid.
    Adapters(Result<Vec<AdapterCard>, String>),
    /// Another process answers at its address.
    AnotherProcess,
}

/// A change of a worker's prefix cache, or a part of a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheReport {
    /// Counts from 0 on each stream; 0 is the snapshot that comes first.
    pub sequence: u64,
    /// The kind of change.
    pub change: CacheReportChange,
    /// Hashes of the blocks, at most [`baton_kv_cache::FEED_HASHES_MAX`].
    pub blocks: Vec<PrefixHash>,
}

/// A kind of change of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheReportChange {
    /// Blocks that are cached from now on.
    Stored,
    /// Blocks that are no longer cached.
    Removed,
    /// A part of a snapshot of all cached blocks.
    Snapshot {
        /// Number of the part, from 0.
        part: u32,
        /// Whether this is the last part; changes follow.
        last: bool,
    },
}
