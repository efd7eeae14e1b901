//! Head sampling: follows the caller's decision, or chooses a share of new traces. Other traces are also recorded, for
//! the ring and for tail sampling; only their flag says that they were not chosen.

use opentelemetry::trace::{Link, SpanKind, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, SamplingResult, ShouldSample};

/// Follows the parent's decision; of traces without a parent, chooses a share.
#[derive(Clone, Debug)]
pub(super) struct HeadSampler {
    chooses: Sampler,
    /// Whether traces that are not chosen are recorded: without a ring they are not, and cost nothing.
    records_rest: bool,
}

impl HeadSampler {
    /// Chooses this share of new traces, 0 to 1.
    pub(super) fn new(ratio: f64, records_rest: bool) -> Self {
        let chooses = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio)));
        Self { chooses, records_rest }
    }
}

impl ShouldSample for HeadSampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let mut result = self.chooses.should_sample(parent, trace, name, kind, attributes, links);
        if self.records_rest && result.decision == SamplingDecision::Drop {
            result.decision = SamplingDecision::RecordOnly;
        }
        result
    }
}
