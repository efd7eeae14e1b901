//! Checks between two hosts: `baton doctor --listen` on one, `baton doctor --connect` on the other.

mod connect;
mod kv;
mod listen;
mod protocol;
mod trouble;

use super::net_devices::NetDevices;

pub(super) use connect::connect;
pub(super) use listen::listen;

/// The lanes and devices for KV on this host: each side has its own device names.
pub(super) struct Way {
    /// `UCX_TLS`, on both sides; Baton's own TCP transport if absent.
    pub(super) tls: Option<String>,
    /// `UCX_NET_DEVICES`; all RDMA devices if none is named.
    pub(super) devices: NetDevices,
    /// Whether the link must use RDMA.
    pub(super) rdma: bool,
}
