//! The status of a cluster. As JSON, which scripts read, its fields have these names, and unknown values are null: on
//! the command line and over HTTP.

use serde::Serialize;

/// A router's view of its cluster.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClusterStatus {
    /// There are no problems.
    pub healthy: bool,
    /// Sorted by severity, the worst first.
    pub problems: Vec<Problem>,
    pub router: Option<RouterStatus>,
    /// Sorted by the name of the instance.
    pub workers: Vec<WorkerStatus>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Problem {
    /// Empty if the problem concerns the whole cluster.
    pub worker: String,
    /// A keyword for scripts, see `Problem.kind` of the protocol.
    pub kind: String,
    /// The problem in words, for people.
    pub text: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct RouterStatus {
    pub running: u64,
    pub running_max: u64,
    pub queued: u64,
    pub models: Vec<String>,
    /// Requests of the last minute in the percentiles.
    pub ttft_count: u64,
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p95_ms: Option<f64>,
    /// Absent if workers register at the router.
    pub etcd_reachable: Option<bool>,
    /// Time since the router's list of workers last matched etcd.
    pub view_age_ms: Option<u64>,
}

/// Fields are as in the protocol's `WorkerStatus`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkerStatus {
    pub instance: String,
    /// Incarnation as 16 hexadecimal digits.
    pub incarnation: String,
    /// prefill, decode or unknown.
    pub role: &'static str,
    pub model: String,
    pub pool: String,
    pub endpoint: String,
    /// starting, ready, draining, avoided, failing, silent, gone or unknown.
    pub state: &'static str,
    pub since_ms: u64,
    pub heard_ms: Option<u64>,
    pub still_ms: Option<u64>,
    pub running: Option<u32>,
    pub running_max: u32,
    pub waiting: Option<u32>,
    pub waiting_max: u32,
    pub blocks: Option<BlockCounts>,
    pub tokens_per_s: Option<f64>,
    pub kv_bytes_per_s: Option<f64>,
    /// The numerics class as one string.
    pub class: String,
    /// Versions, as `1` or `1-2`.
    pub protocol: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct BlockCounts {
    pub total: u64,
    pub free: u64,
    pub referenced: u64,
    pub cached: u64,
    pub quarantined: u64,
}
