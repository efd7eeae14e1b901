//! gRPC plumbing that servers and clients share: limits, keepalive, deadlines.

mod client;
mod config;
mod deadline;
mod dial;
mod messages;
mod operators;
mod probe;
mod server;
mod telemetry;
#[cfg(test)]
mod tests;

pub use client::{Channel, ChannelConfig, ChannelError, Dial, Stream, channel, channel_over};
pub use config::{GrpcConfig, NoAddress};
pub use deadline::{TIMEOUT_HEADER, deadline_of, parse_timeout, set_deadline};
pub use messages::{MessageHold, Messages, PREFIX_BYTES, message_bytes};
pub use probe::WatchProbe;
pub use server::{Router, Server, bind, health, serve, server, server_counting, with_reflection};
pub use telemetry::{KEEP_TRACES_MAX, TelemetryService, summaries};

/// Default interval of keepalive probes: of servers, of clients and over HTTP.
pub(crate) const KEEPALIVE_MS: u64 = 2_000;
/// Default timeout of a keepalive probe.
pub(crate) const KEEPALIVE_WAIT_MS: u64 = 4_000;
/// Bytes that a peer may send on one stream before the reader must have consumed them, in either direction. A long
/// prompt is a few MiB, so it takes a few round trips.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
