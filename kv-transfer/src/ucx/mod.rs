//! UCX in three layers: `ucx_sys::sys` is raw, [`status`] turns statuses into results, and the types here are safe. Only the safe types are
//! used outside of this module.
//!
//! What makes them safe to use:
//! - Everything belongs to one thread: no type is `Send`, so UCX runs in its single-threaded mode without a lock.
//! - An operation owns what it needs until its callback ran: a share of the registered region. Nothing is freed because a caller lost
//!   interest.
//! - Each handle keeps alive what its own handle depends on (endpoint → worker → context), so they are destroyed in order.
//!
//! This module is an unsafe fence.
#![allow(unsafe_code)]

mod context;
mod endpoint;
mod operation;
mod output;
mod status;
mod worker;

pub(crate) use context::{Context, Domain, KeyHead, Memory, version};
pub(crate) use endpoint::{Endpoint, RemoteKey};
pub(crate) use operation::{Done, Token};
pub(crate) use output::take_stdout;
pub(crate) use status::Status;
pub(crate) use worker::{Landing, Worker};

/// Longest header of a message, far below what any transport of UCX accepts.
pub(crate) const HEADER_BYTES_MAX: usize = 64;
