//! What prefill and decode workers share: finding and loading a model, starting an engine and its pool, serving the model's bundle and
//! load reports, getting cached prefixes from each other, joining a cluster, draining.
//!
//! Layer: above `engine`, `kv-transfer`, `text` and `node`; below the two workers, each of which adds its one gRPC service.
//!
//! This crate does not know what a prefill or a decode worker does with a sequence.

#![allow(missing_docs, reason = "parts of one program: most names say what they hold")]

pub mod bring_up;
pub mod call;
mod check_only;
pub mod config;
pub mod credentials;
mod data_plane;
pub mod device;
mod device_kind;
mod draft_model;
pub mod drain;
mod error;
mod grammars;
pub mod grpc;
pub mod hang;
mod health;
pub mod hold;
pub mod lora;
mod main_of;
pub mod metrics;
mod model_dtype;
pub mod models;
mod packed;
pub mod phases;
pub mod prefix_get;
pub mod process;
pub mod report;
pub mod role;
pub mod service;
pub mod settings;
pub mod spans;
mod speculation;
pub mod stream;
pub mod submit;
mod text;
mod threads;

pub use error::WorkerError;
pub use main_of::{main_of, run};
