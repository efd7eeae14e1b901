//! The shipped cores under virtual time.

pub mod executor;
pub mod network;
pub mod random;
pub mod worker;
