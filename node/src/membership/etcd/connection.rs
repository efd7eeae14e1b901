//! Connects to etcd, and sets deadlines for calls.

use super::EtcdConfig;
use super::error::EtcdError;
use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// A connection that is idle for this long is probed, so that a stopped or unreachable etcd is noticed under an idle
/// watch. etcd closes an idle connection that is probed more often than every 5 s (its `--grpc-keepalive-min-time`).
const KEEPALIVE: Duration = Duration::from_secs(6);
const KEEPALIVE_MAX: Duration = Duration::from_secs(4);

/// The node that a session uses. One at a time, and the next after each failure: with several at once, every node that
/// hangs would receive a part of each session's calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node(usize);

impl Node {
    /// A random one, so that sessions spread over the nodes.
    pub(super) fn any() -> Self {
        Self(usize::from(rand::random::<u16>()))
    }

    /// The node at this position of the configuration.
    pub(super) fn at(place: usize) -> Self {
        Self(place)
    }

    /// All nodes, with their addresses.
    pub(super) fn all(config: &EtcdConfig) -> impl Iterator<Item = (Self, String)> {
        config.endpoints.iter().enumerate().map(|(at, endpoint)| (Self(at), endpoint.clone()))
    }

    pub(super) fn endpoint(self, config: &EtcdConfig) -> &str {
        &config.endpoints[self.0 % config.endpoints.len()]
    }

    /// Another one, if there is one.
    pub(super) fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// Connects within `max` to a node that has a leader; files are read again, so that certificates and passwords can be
/// changed in place.
pub(super) async fn connect(config: &EtcdConfig, node: Node, max: Duration) -> Result<Client, EtcdError> {
    connect_with(config, node, max, true).await
}

/// The same, also to a node without a leader, as in a cluster without a quorum.
pub(super) async fn connect_any(config: &EtcdConfig, node: Node, max: Duration) -> Result<Client, EtcdError> {
    connect_with(config, node, max, false).await
}

async fn connect_with(config: &EtcdConfig, node: Node, max: Duration, leader: bool) -> Result<Client, EtcdError> {
    let endpoint = node.endpoint(config);
    let mut options = ConnectOptions::new()
        .with_connect_timeout(max)
        .with_keep_alive(KEEPALIVE, KEEPALIVE_MAX)
        .with_keep_alive_while_idle(true)
        .with_require_leader(leader);
    if let (Some(user), Some(file)) = (&config.user, &config.password_file) {
        options = options.with_user(user.clone(), read(file).await?.trim_end()).with_auto_token_refresh(true);
    }
    if let Some(ca) = &config.ca {
        let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca).await?));
        if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
            tls = tls.identity(Identity::from_pem(read(cert).await?, read(key).await?));
        }
        options = options.with_tls(tls);
    }
    within(max, "connect", Client::connect([endpoint], Some(options))).await
}

async fn read(path: &Path) -> Result<String, EtcdError> {
    tokio::fs::read_to_string(path).await.map_err(|source| EtcdError::File { path: path.into(), source })
}

pub(super) async fn within<T>(
    max: Duration,
    what: &'static str,
    call: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, EtcdError> {
    match timeout(max, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(EtcdError::Silent(what)),
    }
}

/// Adds a deadline to operations that are not calls of etcd.
pub(super) async fn within_time<T>(
    max: Duration,
    what: impl Future<Output = std::io::Result<T>>,
) -> std::io::Result<T> {
    timeout(max, what).await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}
