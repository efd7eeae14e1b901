//! Metrics of keys, and of calls that are refused for their key.

use super::Name;
use crate::auth::Denied;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    reason: Name,
}

/// Metrics of this router's keys. Tenants are not labels: there may be thousands.
#[derive(Clone, Debug)]
pub(crate) struct AuthMetrics {
    keys: Gauge,
    file_errors: Counter,
    refused: Family<Labels, Counter>,
}

impl AuthMetrics {
    /// Registers all metrics; names get the registry's prefix.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let new = Self { keys: Gauge::default(), file_errors: Counter::default(), refused: Family::default() };
        for denied in Denied::ALL {
            drop(new.refused.get_or_create(&Labels { reason: Name(denied.name()) }));
        }
        registry.register("router_auth_keys", "API keys in force; 0 where everybody may call", new.keys.clone());
        let help = "Times that the keys file could not be read again or was wrong; the keys of before stay in force";
        registry.register("router_auth_keys_file_errors", help, new.file_errors.clone());
        registry.register("router_auth_refused", "Calls not let in, by reason", new.refused.clone());
        new
    }

    /// This many keys are in force.
    pub(crate) fn keys(&self, count: usize) {
        self.keys.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The file could not be used.
    pub(crate) fn file_error(&self) {
        self.file_errors.inc();
    }

    /// A call was refused.
    pub(crate) fn refused(&self, denied: Denied) {
        self.refused.get_or_create(&Labels { reason: Name(denied.name()) }).inc();
    }
}
