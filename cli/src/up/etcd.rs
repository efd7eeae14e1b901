//! A prefix in etcd that another cluster uses is told before anything starts: workers of both would have the same names.

use super::variables::{self, key_of};
use baton_node::config::{Check, Checker, CommonArgs, Layers};
use baton_node::membership::etcd::{self, EtcdConfig};
use serde::{Deserialize, Serialize};

/// What of the configuration all children share, and this process needs as well.
#[derive(Default, Serialize, Deserialize)]
struct Shared {
    membership: Membership,
}

#[derive(Default, Serialize, Deserialize)]
struct Membership {
    etcd: EtcdConfig,
}

impl Check for Shared {
    fn check(&self, at: &mut Checker) {
        at.section("membership", &self.membership);
    }
}

impl Check for Membership {
    fn check(&self, at: &mut Checker) {
        at.section("etcd", &self.etcd);
    }
}

/// Fails where workers are registered under `prefix` in the etcd at `endpoints`, separated by commas, reached as the children reach it.
pub(super) async fn ensure_free(endpoints: &str, prefix: &str) -> anyhow::Result<()> {
    let etcd = endpoints.split(',').map(str::to_owned).collect();
    let args = CommonArgs { etcd, etcd_prefix: Some(prefix.to_owned()), ..CommonArgs::default() };
    let mut layers = Layers::of_process(&args, args.overlay());
    layers.env.retain(|(name, _)| key_of(name).starts_with(variables::ETCD));
    let shared: Shared = layers.load()?;
    Ok(etcd::ensure_free(&shared.membership.etcd).await?)
}
