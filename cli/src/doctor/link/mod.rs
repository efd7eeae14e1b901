//! Between two hosts: `baton doctor --listen` on one, `baton doctor --connect` on the other.

mod connect;
mod kv;
mod listen;
mod protocol;

pub(super) use connect::connect;
pub(super) use listen::listen;
