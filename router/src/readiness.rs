//! Whether a request would be served now, and if not, why.

use crate::flow::Core;
use crate::request::PrefillPolicy;
use baton_types::Role;

impl Core {
    /// `Ok` if a request of some model would be served; else the reason.
    pub fn ready(&self) -> Result<(), String> {
        if self.draining.is_cancelled() {
            return Err("draining".into());
        }
        let now = self.runtime.now();
        let models = self.workers.models(now);
        if models.is_empty() {
            let known = self.workers.all().len();
            return Err(format!("no decode worker is ready ({known} workers are registered)"));
        }
        let has_prefill =
            |key| self.workers.candidates(key, |_| true, now).view.iter().any(|w| w.record.role == Role::Prefill);
        if self.limits.policy == PrefillPolicy::Remote && !models.iter().any(|m| has_prefill(&m.key)) {
            return Err("the prefill policy is remote, and no prefill worker is ready".into());
        }
        Ok(())
    }
}
