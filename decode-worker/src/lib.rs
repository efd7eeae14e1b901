//! A decode worker: receives KV, or prefills short prompts itself, and generates.
//!
//! Layer: above `worker`, which starts the engine and the data plane; this crate connects the two for arriving sequences.
//!
//! ```text
//! Decode/Generate ── claim ──> Grants ── offer ──> reservation ── verified ──> running sequence ──> tokens
//! ```
//!
//! It contains no text handling and no placement. It never runs a sequence on KV that the transfer has not verified in full.

#![allow(missing_docs, reason = "parts of one program: most names say what they hold")]

pub mod grants;
mod grpc;
mod handoffs;
mod service;
mod slot;
#[cfg(test)]
mod tests;

/// The service without a server. Not part of the API.
#[doc(hidden)]
pub mod simulation {
    pub use crate::handoffs::Handoffs;
    pub use crate::service::{DecodeRequest, DecodeService};
}

use baton_engine::EngineHandle;
use baton_node::grpc::Router;
use baton_node::membership::Members;
use baton_types::{Role, Runtime};
use baton_worker::config::WorkerConfig;
use baton_worker::role::{BoundRole, Parts, WorkerRole};
use handoffs::Handoffs;
use service::DecodeService;
use std::sync::Arc;

/// The role of a decode worker.
#[derive(Clone, Copy, Debug)]
pub struct DecodeRole {
    claims_max: usize,
}

impl DecodeRole {
    /// With the limits of `config`.
    pub fn new(config: &WorkerConfig) -> Self {
        Self { claims_max: config.engine.waiting_max }
    }
}

impl WorkerRole for DecodeRole {
    fn role(&self) -> Role {
        Role::Decode
    }

    fn bind(self, engine: &EngineHandle, members: Members, runtime: Arc<dyn Runtime>) -> BoundRole {
        let handoffs = Handoffs::start(engine, members, self.claims_max, runtime);
        let counted = handoffs.clone();
        let sink = handoffs.clone();
        let serve = move |server: Router, parts: Parts| grpc::add(server, DecodeService { handoffs, parts });
        BoundRole {
            sink,
            claimed: Arc::new(move || counted.claimed()),
            service_name: grpc::SERVICE_NAME,
            serve: Box::new(serve),
        }
    }
}
