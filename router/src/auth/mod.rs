//! Who calls, and what they may do.
//!
//! ```text
//!  keys file ──> file: read, read again ──> keys: hash -> caller
//!                                             ^
//!  HTTP, gRPC ──> presented: Bearer KEY ──────┘──> Caller, or Denied
//! ```
//!
//! The file holds SHA-256 hashes of keys, never a key. A presented key is hashed and its hash looked up, so how long that takes tells
//! nothing of any key. Without a file all callers are one tenant. Who calls is decided here alone: a tenant named in a request counts for
//! nothing. A key carries its limits: what the file says of it, else what the configuration says of all.

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

/// Whoever sent a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// To whom the key belongs.
    pub(crate) tenant: TenantId,
    /// Whether the key may be used to run the cluster.
    pub(crate) operator: bool,
    /// What the tenant is due beside others.
    pub(crate) weight: Weight,
    /// Its key; `None` where nobody is asked for one.
    pub(crate) key: Option<Key>,
}

/// A key, as its requests are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// The hash of it.
    pub(crate) id: KeyId,
    /// What it may have at once.
    pub(crate) limits: KeyLimits,
}

/// What tells keys apart.
pub(crate) type KeyId = keys::Hash;

impl Caller {
    /// Whose share of the intake its requests are taken from: without keys, that of the address they come from.
    pub(crate) fn client(&self, extensions: &Extensions) -> Client {
        if self.key.is_some() { Client::Tenant(self.tenant.to_string()) } else { address(extensions) }
    }
}

/// Who sent a request, for whoever has no key.
fn address(extensions: &Extensions) -> Client {
    let address = extensions.get::<Peer>().and_then(|peer| peer.addresses.remote_addr());
    Client::at(address.map_or(Ipv4Addr::UNSPECIFIED.into(), |address| address.ip()))
}

/// Decides who calls. Clones share the keys.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// `None` where all callers are one tenant.
    keys: Option<Arc<ArcSwap<Keys>>>,
    /// Whether all callers are operators, too, where there are no keys.
    all_operate: bool,
    metrics: AuthMetrics,
}

impl Access {
    /// Reads the keys, where there is a file of them, and goes on reading it until `stop` is cancelled. Without one, `all_operate` says whether
    /// all callers are operators.
    pub(crate) async fn start(
        config: &AuthConfig,
        all_operate: bool,
        metrics: AuthMetrics,
        stop: CancellationToken,
    ) -> Result<Self, KeysError> {
        let Some(path) = &config.keys_file else { return Ok(Self { keys: None, all_operate, metrics }) };
        let (file, keys) = KeysFile::open(path.clone(), config.limits(), metrics.clone()).await?;
        let keys = Arc::new(ArcSwap::from_pointee(keys));
        tokio::spawn(file.follow(keys.clone(), config.reread(), stop));
        Ok(Self { keys: Some(keys), all_operate, metrics })
    }

    /// Whose key came with these headers.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller, Denied> {
        let Some(keys) = &self.keys else {
            let (tenant, weight) = Default::default();
            return Ok(Caller { tenant, operator: self.all_operate, weight, key: None });
        };
        let caller = presented::key(headers).and_then(|key| keys.load().caller(key).ok_or(Denied::UnknownKey));
        caller.inspect_err(|denied| self.metrics.refused(*denied))
    }

    /// Whose share of the intake a call with these headers is taken from, let in or not: who has no key that is known is an address.
    pub(crate) fn client(&self, headers: &HeaderMap, extensions: &Extensions) -> Client {
        let keys = self.keys.as_ref().map(|keys| keys.load());
        let known = keys.and_then(|keys| keys.caller(presented::key(headers).ok()?));
        known.map_or_else(|| address(extensions), |caller| caller.client(extensions))
    }

    /// The same for what only operators may do.
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
