//! Counts of problems, computed at each scrape.

use super::{ClusterStatus, Kind};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;
use std::time::Instant;

/// The collector of one router.
#[derive(Debug)]
pub(crate) struct StatusMetrics(pub(crate) ClusterStatus);

impl Collector for StatusMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let now = Instant::now();
        let problems = self.0.problems(&self.0.rows(now), now);
        let help = "What `baton status` tells of, by kind: workers concerned, or 1 where it is about the whole";
        let mut family = to.encode_descriptor("router_problems", help, None, MetricType::Gauge)?;
        for kind in Kind::ALL {
            let count = problems.iter().filter(|problem| problem.kind == kind).count();
            ConstGauge::new(count as i64).encode(family.encode_family(&[("kind", kind.name())])?)?;
        }
        Ok(())
    }
}
