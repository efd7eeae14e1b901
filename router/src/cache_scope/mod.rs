//! How requests use the prefix caches of workers: what a router allows, what a request asks for, and under which salt its prefixes are
//! shared.
//!
//! ```text
//!  config: what is allowed ──┐
//!  key ──> tenant ───────────┼──> rules ──> CacheUse ──> workers
//!  request: salt, TTL, pin ──┘      └─ salt
//! ```
//!
//! Pure. The tenant is the key's alone, so whatever a request says, it shares nothing with another tenant's.

mod config;
mod rules;
mod salt;

pub use config::CacheConfig;
pub use rules::CacheOptions;
pub(crate) use rules::CacheRules;
