//! What a router needs from outside: workers to ask, and a clock with tasks. Behind these, all of it runs as well in a simulation, in one
//! thread and under virtual time.
//!
//! ```text
//!  flow, workers ──> Link, Connector ───────> grpc (shipped), or scripted workers
//!                └─> baton_types::Runtime ──> tokio (shipped), or a seeded executor
//! ```
//!
//! Nothing here names protobuf, gRPC or tokio.

mod link;

pub use link::{
    CacheReport, CacheReportChange, CallError, CallSpans, ConnectError, Connector, DecodeCall, Link, PrefillCall,
    WorkerEvents, WorkerReport,
};
