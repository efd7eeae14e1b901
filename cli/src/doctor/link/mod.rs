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
    /// `UCX_TLS`, on both sides.
    pub(super) tls: String,
    /// `UCX_NET_DEVICES`; the device of the control connection's address where nothing is named, which is never an RDMA device.
    pub(super) devices: NetDevices,
    /// It has to be RDMA.
    pub(super) rdma: bool,
}
