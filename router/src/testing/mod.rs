//! Parts for tests: records, scripted workers, clusters of them, an HTTP client.

pub(crate) mod clock;
pub(crate) mod cluster;
pub(crate) mod fake;
pub(crate) mod http;
pub(crate) mod telemetry;
pub(crate) mod text;
pub(crate) mod two;

use crate::port::{CallError, DecodeCall, Link, PrefillCall, WorkerEvents, WorkerReport};
use crate::workers::WorkerHandle;
use baton_node::telemetry::TraceId;
use baton_types::{
    DecodeEvent, Digest, Dtype, ErrorKind, GroupKind, Incarnation, InstanceId, InstanceRecord, KvGroup, KvLayout,
    KvPlane, ModelCard, NumericsClass, PROMPT_LOGPROBS, Party, PrefillEvent, ProtocolRange, RequestError, Role,
    SAMPLING_BAD_WORDS, SAMPLING_CONSTRAINTS, SAMPLING_MIN_P, SAMPLING_TYPICAL_P, SamplingDefaults, Shard,
};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A layout of one full group with two planes.
pub(crate) fn layout(block_tokens: u32, heads: u32) -> KvLayout {
    let plane = |name| KvPlane::try_new(name, heads, 8, Dtype::F32).unwrap();
    let group = KvGroup { kind: GroupKind::Full, layers: vec![0, 1], planes: vec![plane("k"), plane("v")] };
    KvLayout::try_new(block_tokens, vec![group]).unwrap()
}

/// A worker of the model `m`, which has no text.
pub(crate) fn record(role: Role, name: &str) -> InstanceRecord {
    InstanceRecord {
        party: Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(7) },
        role,
        labels: BTreeMap::new(),
        pool: "default".into(),
        endpoint: "127.0.0.1:9".into(),
        card: ModelCard {
            id: "m".into(),
            served_names: vec!["m".into()],
            revision: String::new(),
            fingerprint: Digest([1; 32]),
            context_max: 8192,
            vocab: 1000,
            end_tokens: vec![2],
            defaults: SamplingDefaults::default(),
            bundle: None,
        },
        protocol: ProtocolRange { min: 1, max: 1 },
        layout: layout(16, 2),
        class: NumericsClass { order: "test".into(), weights: Dtype::F32.into(), kv: Dtype::F32, kernel_revision: 1 },
        capacity_tokens: 8192,
        running_max: 16,
        waiting_max: 16,
        shards: vec![Shard { transfer_address: b"address".to_vec(), layers: 0..2, kv_heads: 0..2 }],
        capabilities: [SAMPLING_CONSTRAINTS, SAMPLING_MIN_P, SAMPLING_TYPICAL_P, SAMPLING_BAD_WORDS, PROMPT_LOGPROBS]
            .map(str::to_owned)
            .to_vec(),
    }
}

/// A worker that receives no calls.
pub(crate) fn handle(record: InstanceRecord) -> WorkerHandle {
    WorkerHandle::new(Arc::new(record), Box::new(Nobody))
}

/// The link to a worker that receives no calls.
#[derive(Debug)]
struct Nobody;

/// A call that nobody answers.
pub(crate) fn nobody<T: Send + 'static>() -> BoxFuture<'static, Result<T, CallError>> {
    let error = CallError::Lost(RequestError::new(ErrorKind::Unavailable, "nobody is asked here"));
    std::future::ready(Err(error)).boxed()
}

impl Link for Nobody {
    fn decode(&self, _: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>> {
        nobody()
    }

    fn prefill(&self, _: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>> {
        nobody()
    }

    fn watch(&self, _: &str, _: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>> {
        nobody()
    }

    fn bundle(&self, _: Digest, _: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>> {
        nobody()
    }

    fn keep(&self, _: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>> {
        nobody()
    }
}
