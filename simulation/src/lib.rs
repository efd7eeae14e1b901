//! The shipped cores under virtual time.

pub mod executor;
pub mod random;
