//! Who is registered, as this router sees it; read when it is asked for.

use crate::placement::{Kind, unpaired};
use crate::workers::WorkerSet;
use baton_node::membership::RouterBackend;
use baton_types::{InstanceRecord, Role};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// The collector of one router.
#[derive(Debug)]
pub(crate) struct MembershipMetrics {
    /// Who is registered.
    pub(crate) membership: RouterBackend,
    /// Who is placed on.
    pub(crate) workers: Arc<WorkerSet>,
}

impl Collector for MembershipMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let mut gauge = |name: &str, help: &str, value: usize| {
            ConstGauge::new(value as i64).encode(to.encode_descriptor(name, help, None, MetricType::Gauge)?)
        };
        let registered = self.membership.membership().view().borrow().members.len();
        gauge("router_registered_workers", "Workers in this router's view", registered)?;
        let answers = usize::from(self.membership.store().is_none_or(|store| store.reachable));
        gauge(
            "router_membership_up",
            "1 while whoever keeps the membership answers: etcd, or this router itself",
            answers,
        )?;
        let help = "Workers in this router's view whose record vanished in a way that is not believed; they are asked";
        gauge("router_doubted_workers", help, self.membership.doubted())?;
        let help = "Workers that a request would be placed on: admitted, heard of late, healthy and not draining";
        let mut family = to.encode_descriptor("router_ready_workers", help, None, MetricType::Gauge)?;
        let ready = self.workers.ready(Instant::now());
        for role in [Role::Prefill, Role::Decode] {
            let workers = ready.iter().filter(|w| w.record.role == role).count();
            ConstGauge::new(workers as i64).encode(family.encode_family(&[("role", role.name())])?)?;
        }
        let help =
            "Ready workers that no ready worker of the other role can exchange KV with, although its model has such";
        let mut family = to.encode_descriptor("router_unpaired_workers", help, None, MetricType::Gauge)?;
        let records: Vec<&InstanceRecord> = ready.iter().map(|worker| &*worker.record).collect();
        for (Kind { model, pool, role }, workers) in unpaired(&records) {
            let labels = [("model", model.as_str()), ("pool", pool.as_str()), ("role", role)];
            ConstGauge::new(workers as i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
