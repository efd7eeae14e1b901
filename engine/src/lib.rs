//! Placeholder.
pub mod model;
pub mod sampler;
pub mod weights;
