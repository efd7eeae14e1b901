//! The section `grpc`.

use super::{KEEPALIVE_MS, KEEPALIVE_WAIT_MS};
use crate::config::{ByteSize, Check, Checker};
use crate::host::own_address;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};

/// No address of this host is known to others.
#[derive(Debug, thiserror::Error)]
#[error(
    "listens on {0}, every address of this host, but the host has no route to others: say by which address they reach it, --advertise HOST:PORT (grpc.advertise)"
)]
pub struct NoAddress(SocketAddr);

/// A gRPC server's address and limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpcConfig {
    /// The listen address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// `host:port` under which others reach it. By default the listen address, or where that is all addresses of this
    /// host, the one from which it reaches others.
    pub advertise: Option<String>,
    /// Largest message that is accepted, in bytes.
    pub message_bytes_max: ByteSize,
    /// Longest time from the start of a message to its end; after it the call ends.
    pub message_ms_max: u64,
    /// Most connections at once; further ones wait until one of them closes.
    pub connections_max: u32,
    /// Most calls in flight on one connection.
    pub streams_max: u32,
    /// Interval of keepalive probes on idle connections.
    pub keepalive_ms: u64,
    /// A probe without an answer for this long ends the connection.
    pub keepalive_wait_ms_max: u64,
}

impl Default for GrpcConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            // A million token ids are at most 5 MiB of varints.
            message_bytes_max: ByteSize(8 << 20),
            // The largest one, at 2 Mbit/s.
            message_ms_max: 30_000,
            connections_max: 16_384,
            streams_max: 1_024,
            keepalive_ms: KEEPALIVE_MS,
            keepalive_wait_ms_max: KEEPALIVE_WAIT_MS,
        }
    }
}

impl GrpcConfig {
    /// The same settings with another address.
    #[must_use]
    pub fn on(self, listen: SocketAddr) -> Self {
        Self { listen, ..self }
    }

    /// The address under which others reach the port that is bound to `bound`.
    ///
    /// # Errors
    /// If it is bound to all addresses of a host that has no route to others, and none is configured.
    pub fn reached_at(&self, bound: SocketAddr) -> Result<String, NoAddress> {
        if let Some(configured) = &self.advertise {
            return Ok(configured.clone());
        }
        if !bound.ip().is_unspecified() {
            return Ok(bound.to_string());
        }
        let found = own_address(bound.ip()).ok_or(NoAddress(bound))?;
        let found = SocketAddr::new(found, bound.port());
        tracing::info!(address = %found, "publishes the address from which this host reaches others; grpc.advertise sets another");
        Ok(found.to_string())
    }

    /// [`GrpcConfig::message_bytes_max`], for `max_decoding_message_size` of each service.
    pub fn message_max(&self) -> usize {
        usize::try_from(self.message_bytes_max.0).unwrap_or(usize::MAX)
    }
}

impl Check for GrpcConfig {
    fn check(&self, at: &mut Checker) {
        at.range("message_bytes_max", self.message_bytes_max.0, 64 << 10..=1 << 30)
            .range("message_ms_max", self.message_ms_max, 100..=3_600_000)
            .range("connections_max", self.connections_max, 1..=1 << 20)
            .range("streams_max", self.streams_max, 1..=1 << 20)
            .range("keepalive_ms", self.keepalive_ms, 100..=3_600_000)
            .range("keepalive_wait_ms_max", self.keepalive_wait_ms_max, 100..=3_600_000);
        let named = self.advertise.as_deref().is_none_or(|a| {
            a.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        });
        at.require("advertise", named, "host:port");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_told_an_address_that_they_can_reach() {
        let at = |advertise: Option<&str>, bound: &str| {
            let config = GrpcConfig { advertise: advertise.map(str::to_owned), ..GrpcConfig::default() };
            config.reached_at(bound.parse().unwrap())
        };
        assert_eq!(at(Some("worker-0:7"), "0.0.0.0:50051").unwrap(), "worker-0:7");
        assert_eq!(at(None, "127.0.0.1:50051").unwrap(), "127.0.0.1:50051");
        for any in ["0.0.0.0:50051", "[::]:50051"] {
            match at(None, any) {
                Ok(found) => {
                    let found: SocketAddr = found.parse().unwrap();
                    assert!(!found.ip().is_unspecified() && found.port() == 50051, "{found}");
                }
                Err(none) => assert!(none.to_string().contains("--advertise HOST:PORT"), "{none}"),
            }
        }
    }
}
