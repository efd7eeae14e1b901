//! gRPC plumbing that servers and clients share: limits, keepalive, deadlines.

mod client;
mod config;
mod deadline;
mod handshakes;
mod messages;
mod probe;
mod server;
mod telemetry;
#[cfg(test)]
mod tests;

pub use client::{Channel, ChannelConfig, ChannelError, Dial, Stream, channel, channel_over};
pub use config::GrpcConfig;
pub use deadline::{TIMEOUT_HEADER, deadline_of, parse_timeout, set_deadline};
pub use messages::{MessageHold, Messages, PREFIX_BYTES, message_bytes};
pub use probe::WatchProbe;
pub use server::{Router, Server, bind, health, serve, server, server_counting, with_reflection};
pub use telemetry::{KEEP_TRACES_MAX, TelemetryService, summaries};
