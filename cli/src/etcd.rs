//! The command line's connection to etcd: with the same flags and variables as the processes of a cluster.

use baton_node::config::{Check, Checker, CommonArgs, ConfigError, ENV_PREFIX, Layers};
use baton_node::identity::IdentityConfig;
use baton_node::membership::etcd::EtcdConfig;
use serde::{Deserialize, Serialize};

/// Variables of the section `membership.etcd`, in lower case and without their prefix, begin with this.
pub(crate) const VARIABLES: &str = "membership__etcd__";

/// The part of the configuration that all processes of a cluster share and that this one needs too.
#[derive(Default, Serialize, Deserialize)]
struct Shared {
    identity: IdentityConfig,
    membership: Membership,
}

#[derive(Default, Serialize, Deserialize)]
struct Membership {
    etcd: EtcdConfig,
}

impl Check for Shared {
    fn check(&self, at: &mut Checker) {
        at.section("identity", &self.identity).section("membership", &self.membership);
        self.identity.check_etcd(&self.membership.etcd, at);
    }
}

impl Check for Membership {
    fn check(&self, at: &mut Checker) {
        at.section("etcd", &self.etcd);
    }
}

/// The key that a variable sets, its levels joined by two underscores.
pub(crate) fn key_of(name: &str) -> String {
    name.strip_prefix(ENV_PREFIX).unwrap_or(name).to_ascii_lowercase()
}

/// The section from the variables of this process, with these endpoints and this prefix, if given, taking precedence.
pub(crate) fn config(endpoints: Vec<String>, prefix: Option<String>) -> Result<EtcdConfig, ConfigError> {
    let args = CommonArgs { etcd: endpoints, etcd_prefix: prefix, ..CommonArgs::default() };
    let mut layers = Layers::of_process(&args, args.overlay());
    layers.file = None;
    layers.env.retain(|(name, _)| key_of(name).starts_with(VARIABLES) || key_of(name).starts_with("identity__"));
    let Shared { identity, membership } = layers.load()?;
    Ok(identity.for_etcd(&membership.etcd))
}
