//! Placeholder.
pub mod weights;
