//! One start of a worker: what a process holds together, over simulated ports.

pub mod transfer;
