//! Registered workers, as this router sees them; read at each scrape.

use super::ready::ReadyWorkers;
use crate::placement::{Kind, unpaired};
use crate::workers::WorkerSet;
use baton_node::membership::RouterBackend;
use baton_types::InstanceRecord;
use parking_lot::Mutex;
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
    membership: RouterBackend,
    /// Workers that requests are placed on.
    workers: Arc<WorkerSet>,
    counted: Mutex<ReadyWorkers>,
}

impl MembershipMetrics {
    /// A collector over these.
    pub(crate) fn new(membership: RouterBackend, workers: Arc<WorkerSet>) -> Self {
        Self { membership, workers, counted: Mutex::default() }
    }
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
        let help = "Workers that this router remembers or found by their addresses, since etcd has not answered from its start on";
        gauge("router_unconfirmed_workers", help, self.membership.unconfirmed().unwrap_or(0))?;
        let nodes = self.membership.etcd_nodes().unwrap_or_default();
        let help = "Clusters that the configured nodes of etcd are, as far as they answer: more than 1 is a split";
        gauge("router_etcd_clusters", help, nodes.clusters())?;
        let help = "Alarms and errors that nodes of etcd tell of, such as a lack of space";
        gauge("router_etcd_alarms", help, nodes.complaints().count())?;
        let help = "Workers in this router's view whose record vanished in a way that is not believed; they are asked";
        gauge("router_doubted_workers", help, self.membership.doubted())?;
        let help = "Workers that a request would be placed on: admitted, heard of late, healthy and not draining";
        let mut family = to.encode_descriptor("router_ready_workers", help, None, MetricType::Gauge)?;
        let now = Instant::now();
        let (all, ready) = (self.workers.all(), self.workers.ready(now));
        let all: Vec<&InstanceRecord> = all.iter().map(|worker| &*worker.record).collect();
        let ready: Vec<&InstanceRecord> = ready.iter().map(|worker| &*worker.record).collect();
        let counts = self.counted.lock().count(&all, &ready, now);
        for (kind, workers) in counts {
            ConstGauge::new(workers as i64).encode(family.encode_family(&labels(&kind))?)?;
        }
        let help =
            "Ready workers that no ready worker of the other role can exchange KV with, although its model has such";
        let mut family = to.encode_descriptor("router_unpaired_workers", help, None, MetricType::Gauge)?;
        for (kind, workers) in unpaired(&ready) {
            ConstGauge::new(workers as i64).encode(family.encode_family(&labels(&kind))?)?;
        }
        Ok(())
    }
}

fn labels(kind: &Kind) -> [(&'static str, &str); 3] {
    [("model", kind.model.as_str()), ("pool", kind.pool.as_str()), ("role", kind.role)]
}
