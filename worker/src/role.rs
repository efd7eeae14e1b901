//! What a role brings to a worker, and what the worker gives its service in return.

use crate::drain::Drain;
use crate::lora::Adapters;
use crate::phases::Phases;
use crate::service::Claims;
use baton_engine::EngineHandle;
use baton_kv_transfer::{KvTransfer, SinkHandler};
use baton_node::grpc::Router;
use baton_node::membership::Members;
use baton_types::{Digest, ErrorKind, Party, RequestError, Role, Runtime, seeded};
use opentelemetry_sdk::trace::SdkTracer;
use std::sync::Arc;
use std::time::Duration;

/// The role of a worker: prefill or decode.
pub trait WorkerRole: Send + 'static {
    fn role(&self) -> Role;
    /// Connects the role with the engine that it will run on. `members` are the workers that may read its cache; `runtime` runs its
    /// tasks.
    fn bind(self, engine: &EngineHandle, members: Members, runtime: Arc<dyn Runtime>) -> BoundRole;
}

/// What a role adds to a worker.
pub struct BoundRole {
    /// Receives the KV that peers put here.
    pub sink: Arc<dyn SinkHandler>,
    /// Claimed capacity, for load reports.
    pub claimed: Claims,
    /// Name of the role's gRPC service.
    pub service_name: &'static str,
    /// Adds the role's service to the server.
    pub serve: Box<dyn FnOnce(Router, Parts) -> Router + Send>,
}

/// The components that a role's service uses.
#[derive(Clone)]
pub struct Parts {
    pub engine: EngineHandle,
    pub transfer: KvTransfer,
    /// Accepts or refuses each call.
    pub drain: Drain,
    pub tracer: SdkTracer,
    pub phases: Phases,
    pub call_max: Duration,
    pub message_max: usize,
    /// Fingerprint of the model.
    pub model: Digest,
    /// LoRA adapters, if it serves any.
    pub adapters: Option<Adapters>,
    /// Runs calls, and provides the time.
    pub runtime: Arc<dyn Runtime>,
}

impl Parts {
    /// Refuses a call that names another start of this worker: that one may have had other weights and blocks.
    pub fn check_party(&self, meant: &Party) -> Result<(), RequestError> {
        let ours = self.transfer.party();
        let is_same_name = seeded!(OtherIncarnation) && meant.instance == ours.instance;
        if meant == ours || is_same_name {
            return Ok(());
        }
        let message = format!("{ours} answers here now, and {meant} was called; send the request to another worker");
        Err(RequestError::new(ErrorKind::Unavailable, message))
    }
}
