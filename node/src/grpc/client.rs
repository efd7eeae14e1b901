//! Client channels.

use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

/// Settings of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Longest connect.
    pub connect_ms_max: u64,
    /// How often a connection is probed, also when idle, so that a lost peer is noticed.
    pub keepalive_ms: u64,
    /// A probe that is not answered for this long ends the connection, and every call on it.
    pub keepalive_wait_ms_max: u64,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        Self { connect_ms_max: 2_000, keepalive_ms: 2_000, keepalive_wait_ms_max: 4_000 }
    }
}

/// An address that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is no address of a gRPC server; write host:port or http://host:port")]
pub struct ChannelError {
    /// The address.
    pub address: String,
    /// Why.
    pub source: tonic::transport::Error,
}

/// A channel to `address` (`host:port` or a URL). It connects when first used and again whenever the connection broke; must be called
/// within a tokio runtime.
pub fn channel(address: &str, config: &ChannelConfig) -> Result<Channel, ChannelError> {
    let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let refuse = |source| ChannelError { address: address.into(), source };
    let endpoint = Endpoint::from_shared(url).map_err(refuse)?;
    let endpoint = endpoint
        .connect_timeout(Duration::from_millis(config.connect_ms_max))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_millis(config.keepalive_ms))
        .keep_alive_timeout(Duration::from_millis(config.keepalive_wait_ms_max))
        .keep_alive_while_idle(true)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20);
    Ok(endpoint.connect_lazy())
}
