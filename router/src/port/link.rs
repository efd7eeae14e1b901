//! The port to workers: what a router asks of one.

use baton_kv_cache::PrefixHash;
use baton_node::telemetry::TraceId;
use baton_types::{
    DecodeEvent, Digest, ErrorKind, InstanceRecord, LoadReport, Party, PrefillEvent, RequestError, SequenceSpec,
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
    /// If its endpoint is no address.
    fn connect(&self, record: &InstanceRecord) -> Result<Box<dyn Link>, ConnectError>;
}

/// Why there is no link to a worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its endpoint is no address: {0}")]
pub struct ConnectError(pub String);

/// One worker in one incarnation. Whoever drops a future or a stream cancels the call at the worker.
pub trait Link: Debug + Send + Sync {
    /// Asks a decode worker to claim capacity for a sequence and to generate. The first event is its claim.
    fn decode(&self, call: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>>;

    /// Asks a prefill worker to run a prompt for a decode worker that has claimed capacity for it.
    fn prefill(&self, call: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>>;

    /// Asks for reports of its load, and where `cache` of its prefix cache, until the stream is dropped. `router` names who asks, for logs.
    fn watch(&self, router: &str, cache: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>>;

    /// Asks for the bundle of tokenizer and template with this digest: at most `bytes_max` bytes and one chunk more, unverified.
    fn bundle(&self, digest: Digest, bytes_max: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>>;

    /// Asks to export what it has of these traces.
    fn keep(&self, traces: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>>;
}

/// What a worker says, until it ends the call.
pub type WorkerEvents<T> = BoxStream<'static, Result<T, CallError>>;

/// Why a call failed, as far as it matters for what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The worker itself said so.
    Refused(RequestError),
    /// Nobody said so: the worker cannot be reached ([`ErrorKind::Unavailable`]), went away, or did not answer in time, or what came is no
    /// answer.
    Lost(RequestError),
}

impl CallError {
    /// Whether the worker itself said that it has no room.
    pub fn is_no_room(&self) -> bool {
        matches!(self, Self::Refused(error) if error.kind == ErrorKind::Overloaded)
    }

    /// The error without who is at fault.
    pub fn error(&self) -> &RequestError {
        let (Self::Refused(error) | Self::Lost(error)) = self;
        error
    }
}

/// What a decode worker is asked for.
#[derive(Debug)]
pub struct DecodeCall<'a> {
    /// Prompt, and what was generated so far.
    pub sequence: SequenceSpec,
    /// The prefill worker whose KV it is to await; `None` prefills there.
    pub source: Option<&'a Party>,
    /// When the worker may give up.
    pub deadline: Instant,
    /// For the trace.
    pub spans: CallSpans<'a>,
}

/// What a prefill worker is asked for.
#[derive(Debug)]
pub struct PrefillCall<'a> {
    /// Prompt, and what was generated so far.
    pub sequence: SequenceSpec,
    /// The decode worker that holds the claim.
    pub sink: &'a InstanceRecord,
    /// Tokens of the prompt that it has once it got from the sink's cache what it lacks of them; 0 gets nothing.
    pub get_to_tokens: u64,
    /// When the worker may give up.
    pub deadline: Instant,
    /// For the trace.
    pub spans: CallSpans<'a>,
}

/// The spans of one call.
#[derive(Clone, Copy, Debug)]
pub struct CallSpans<'a> {
    pub call: &'a Span,
    pub request: &'a Span,
}

/// What a worker reports of itself.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerReport {
    /// Its load, from the worker that was called.
    Load(LoadReport),
    /// A change of its prefix cache; an error says what is wrong with the message.
    Cache(Result<CacheReport, &'static str>),
    /// Another process answers at its address.
    AnotherProcess,
}

/// A change of a worker's prefix cache, or a part of all that is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheReport {
    /// Counted anew on each stream: 0 for the snapshot that comes first.
    pub sequence: u64,
    /// What became of the blocks.
    pub change: CacheReportChange,
    /// At most [`baton_kv_cache::FEED_HASHES_MAX`].
    pub blocks: Vec<PrefixHash>,
}

/// What became of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheReportChange {
    /// Cached from now on.
    Stored,
    /// Cached no more.
    Removed,
    /// A part of all that is cached.
    Snapshot {
        /// From 0 on.
        part: u32,
        /// Whether events come next.
        last: bool,
    },
}
