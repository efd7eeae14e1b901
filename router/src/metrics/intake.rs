//! Bytes of what is not yet a request.

use baton_node::intake::Intake;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// The budget, asked when it is read.
#[derive(Debug)]
pub(crate) struct IntakeMetrics(pub(crate) Intake);

impl Collector for IntakeMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Bytes held for requests that are still being read";
        let used = ConstGauge::new(i64::try_from(self.0.used()).unwrap_or(i64::MAX));
        used.encode(to.encode_descriptor("router_intake_bytes", help, None, MetricType::Gauge)?)
    }
}
