//! How requests use the prefix caches of workers: what the router allows, what a request asks for, and the salt under
//! which its prefixes are shared.
//!
//! ```text
//!  config: what is allowed ──┐
//!  key ──> tenant ───────────┼──> rules ──> CacheUse ──> workers
//!  request: salt, TTL, pin ──┘      └─ salt
//! ```
//!
//! Pure. The tenant comes from the key only, so no field of a request can make it share blocks with another tenant.

mod config;
mod rules;
mod salt;

pub use config::CacheConfig;
pub use rules::CacheOptions;
pub(crate) use rules::CacheRules;
