//! The router's dependencies: workers to call, and a clock with tasks. With other implementations of these, the whole
//! router runs in a simulation, in one thread and under virtual time.
//!
//! ```text
//!  flow, workers ──> Link, Connector ───────> grpc (shipped), or scripted workers
//!                └─> baton_types::Runtime ──> tokio (shipped), or a seeded executor
//! ```
//!
//! This module uses neither protobuf, gRPC nor tokio.

mod link;

pub use link::{
    CacheReport, CacheReportChange, CallError, CallSpans, ConnectError, Connector, DecodeCall, Link, PrefillCall,
    WorkerEvents, WorkerReport,
};
