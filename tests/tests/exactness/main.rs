//! The same bits however a request is served, and KV that a device shows late.

mod bits;
mod families;
mod late_landing;
