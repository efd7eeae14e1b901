//! Bytes of requests that are not parsed yet, and of answers that are not sent yet.

use baton_node::intake::Intake;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// The budgets, read at each scrape.
#[derive(Debug)]
pub(crate) struct IntakeMetrics {
    /// Budget of requests that are being read.
    pub(crate) requests: Intake,
    /// Budget of answers that are being gathered.
    pub(crate) answers: Intake,
}

impl Collector for IntakeMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (requests, answers) = ("router_intake_bytes", "router_answers_bytes");
        for (name, help, budget) in [
            (requests, "Bytes held for requests that are still being read", &self.requests),
            (
                answers,
                "Bytes held for answers that are gathered before they are sent, and for what may wait of streams",
                &self.answers,
            ),
        ] {
            let used = ConstGauge::new(i64::try_from(budget.used()).unwrap_or(i64::MAX));
            used.encode(to.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}
