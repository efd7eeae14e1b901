//! Whether a request would be served now, and if not, why.

use crate::flow::Core;
use crate::request::PrefillPolicy;
use baton_types::Role;
use std::time::Instant;

/// `Ok` where a request of some model would be served.
pub(crate) fn readiness(core: &Core) -> Result<(), String> {
    if core.draining.is_cancelled() {
        return Err("draining".into());
    }
    let now = Instant::now();
    let models = core.workers.models(now);
    if models.is_empty() {
        let known = core.workers.all().len();
        return Err(format!("no decode worker is ready ({known} workers are registered)"));
    }
    let has_prefill =
        |key| core.workers.candidates(key, |_| true, now).view.iter().any(|w| w.record.role == Role::Prefill);
    if core.limits.policy == PrefillPolicy::Remote && !models.iter().any(|m| has_prefill(&m.key)) {
        return Err("the prefill policy is remote, and no prefill worker is ready".into());
    }
    Ok(())
}
