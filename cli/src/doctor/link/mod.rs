//! Between two hosts: `baton doctor --listen` on one, `baton doctor --connect` on the other.

mod connect;
mod kv;
mod listen;
mod protocol;
mod trouble;

use super::net_devices::NetDevices;

pub(super) use connect::connect;
pub(super) use listen::listen;

/// What KV is to go over, on this host: each side has names of its own for its devices.
pub(super) struct Way {
    /// `UCX_TLS`, on both sides; TCP of Baton's own where absent.
    pub(super) tls: Option<String>,
    /// `UCX_NET_DEVICES`; all of RDMA where nothing is named.
    pub(super) devices: NetDevices,
    /// It has to be RDMA.
    pub(super) rdma: bool,
}
