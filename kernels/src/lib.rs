//! Placeholder.
pub mod ops;
