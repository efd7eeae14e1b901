//! A prefill worker: runs prompts and puts their KV to the decode worker that the router named.
//!
//! Layer: above `worker`, which starts the engine and the data plane; this crate connects the two for prompts.
//!
//! It contains no text handling and no placement, and does not know what happens to a sequence after its commit.

#![allow(missing_docs, reason = "parts of one program: most names say what they hold")]

mod grpc;
mod put;
mod service;
mod sink;
#[cfg(test)]
mod tests;

#[doc(hidden)] // For the simulation.
pub use put::handoff_error;

/// The service without a server. Not part of the API.
#[doc(hidden)]
pub mod simulation {
    pub use crate::service::{PrefillRequest, PrefillService};
    pub use crate::sink::NoSink;
}

use baton_engine::EngineHandle;
use baton_node::grpc::Router;
use baton_node::membership::Members;
use baton_types::{Role, Runtime};
use baton_worker::role::{BoundRole, Parts, WorkerRole};
use baton_worker::service::Claimed;
use service::PrefillService;
use std::sync::Arc;

/// The role of a prefill worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillRole;

impl WorkerRole for PrefillRole {
    fn role(&self) -> Role {
        Role::Prefill
    }

    fn bind(self, engine: &EngineHandle, members: Members, _: Arc<dyn Runtime>) -> BoundRole {
        let serve = |server: Router, parts: Parts| grpc::add(server, PrefillService { parts });
        BoundRole {
            sink: Arc::new(sink::NoSink { engine: engine.clone(), members }),
            claimed: Arc::new(Claimed::default),
            service_name: grpc::SERVICE_NAME,
            serve: Box::new(serve),
        }
    }
}
