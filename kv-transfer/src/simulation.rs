//! Interface for running a service in one thread under virtual time. Not part of the API.
//!
//! [`crate::KvTransfer::drive`] makes a handle and a [`Driver`] over [`Ports`]: a [`Transport`] that the simulation implements, a
//! [`Verifier`] that runs each [`Job`] at once or later, [`Calls`] of the worker's handler made at once ([`Inline`]) or later, and a source
//! of random bits. [`Driver`] documents how to run it.

pub use crate::calls::{Call, Calls, Inline};
pub use crate::driver::{Driver, Ports, Turn};
pub use crate::message::RemoteRegion;
pub use crate::plan::CopyRun;
pub use crate::transport::{ConnId, Event, Transport, Wake};
pub use crate::verify::{Job, Verifier};
pub use crate::window::Window;
