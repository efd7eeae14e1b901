//! Who calls, and what they may do.
//!
//! ```text
//!  keys file ──> file: read, read again ──> keys: hash -> caller
//!                                             ^
//!  HTTP, gRPC ──> presented: the key ─────────┘──> Caller, or Denied
//! ```
//!
//! The file holds SHA-256 hashes of keys, never a key. A presented key is hashed before the lookup, so the lookup time
//! reveals nothing about any key. Without a file all callers are one tenant, which may have one key. Only this module
//! decides who the caller is: a tenant named in a request is ignored. A key has the limits that the file sets for it,
//! else those of the configuration.

mod config;
mod denied;
mod error;
mod file;
mod keys;
mod limits;
mod presented;

pub use config::AuthConfig;
pub(crate) use denied::Denied;
pub use error::KeysError;
pub(crate) use limits::KeyLimits;
pub(crate) use presented::KEY_HEADERS;

use crate::metrics::AuthMetrics;
use arc_swap::ArcSwap;
use baton_node::intake::Client;
use baton_node::listen::Peer;
use baton_types::{TenantId, Weight};
use file::KeysFile;
use http::{Extensions, HeaderMap};
use keys::Keys;
use std::net::Ipv4Addr;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// The sender of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The tenant that owns the key.
    pub(crate) tenant: TenantId,
    /// Whether the key allows operator calls.
    pub(crate) operator: bool,
    /// The tenant's weight in fair sharing.
    pub(crate) weight: Weight,
    /// Its key; `None` if the router does not ask for keys.
    pub(crate) key: Option<Key>,
}

/// A key, for counting its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// The hash of the key.
    pub(crate) id: KeyId,
    /// Its limits on what is in flight.
    pub(crate) limits: KeyLimits,
}

/// Identifies a key by its SHA-256.
pub(crate) type KeyId = keys::Hash;

impl Caller {
    /// The client whose share of the intake its requests use: without keys, the source address.
    pub(crate) fn client(&self, extensions: &Extensions) -> Client {
        if self.key.is_some() { Client::Tenant(self.tenant.to_string()) } else { address(extensions) }
    }
}

/// The client for a caller without a key: its address.
fn address(extensions: &Extensions) -> Client {
    let address = extensions.get::<Peer>().and_then(|peer| peer.addresses.remote_addr());
    Client::at(address.map_or(Ipv4Addr::UNSPECIFIED.into(), |address| address.ip()))
}

/// Authenticates callers. Clones share the keys.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// `None` if all callers are one tenant.
    keys: Option<Arc<ArcSwap<Keys>>>,
    /// Without keys: whether all callers are also operators.
    all_operate: bool,
    metrics: AuthMetrics,
}

impl Access {
    /// Reads the keys if a file is configured, and reads it again at an interval until `stop` is cancelled. Without a
    /// file, `all_operate` says whether all callers are operators, or all that know the one key.
    pub(crate) async fn start(
        config: &AuthConfig,
        all_operate: bool,
        metrics: AuthMetrics,
        stop: CancellationToken,
    ) -> Result<Self, KeysError> {
        let Some(path) = &config.keys_file else {
            let keys = config.api_key.as_ref().map(|key| {
                metrics.keys(1);
                Arc::new(ArcSwap::from_pointee(Keys::one(key.expose().as_bytes(), all_operate, config.limits())))
            });
            return Ok(Self { keys, all_operate, metrics });
        };
        let (file, keys) = KeysFile::open(path.clone(), config.limits(), metrics.clone()).await?;
        let keys = Arc::new(ArcSwap::from_pointee(keys));
        tokio::spawn(file.follow(keys.clone(), config.reread(), stop));
        Ok(Self { keys: Some(keys), all_operate, metrics })
    }

    /// The caller whose key is in these headers.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller, Denied> {
        let Some(keys) = &self.keys else {
            let (tenant, weight) = Default::default();
            return Ok(Caller { tenant, operator: self.all_operate, weight, key: None });
        };
        let caller = presented::key(headers).and_then(|key| keys.load().caller(key).ok_or(Denied::UnknownKey));
        caller.inspect_err(|denied| self.metrics.refused(*denied))
    }

    /// The client whose share of the intake a call with these headers uses, allowed or not. A caller without a known
    /// key counts by its address.
    pub(crate) fn client(&self, headers: &HeaderMap, extensions: &Extensions) -> Client {
        let keys = self.keys.as_ref().map(|keys| keys.load());
        let known = keys.and_then(|keys| keys.caller(presented::key(headers).ok()?));
        known.map_or_else(|| address(extensions), |caller| caller.client(extensions))
    }

    /// As [`Self::operator`], for calls that only read. Where `open`, all callers may make them if there are no keys.
    pub(crate) fn reader(&self, headers: &HeaderMap, open: bool) -> Result<Caller, Denied> {
        if open && self.keys.is_none() { self.caller(headers) } else { self.operator(headers) }
    }

    /// As [`Self::caller`], for calls that only operators may make.
    pub(crate) fn operator(&self, headers: &HeaderMap) -> Result<Caller, Denied> {
        let caller = self.caller(headers)?;
        if !caller.operator {
            let denied = if self.keys.is_some() { Denied::NotOperator } else { Denied::NoOperators };
            self.metrics.refused(denied);
            return Err(denied);
        }
        Ok(caller)
    }
}
