//! Statistics of past answers: their lengths, and how far predictions were off.

use super::longest::Longest;
use super::slowness::{Learned, Slowness};
use super::{Prediction, Standing};
use baton_types::TenantLabel;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// An answer longer than expected raises the expected length by this share; a shorter one lowers it again.
const LONGER_BY: f64 = 1.0 / 16.0;
/// Most models that are remembered; a cluster serves a handful.
const MODELS_MAX: usize = 1024;
/// Most tenants whose answers of a model are remembered. For another one, nothing is known.
const TENANTS_MAX: usize = 4096;

/// An answer that ended, complete or not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) tenant: TenantLabel,
    /// Its tenant's standing when it was predicted.
    pub(crate) standing: Standing,
    pub(crate) tokens: u32,
    /// Whether it was not cut off by its client, its deadline or a fault.
    pub(crate) finished: bool,
    /// Time from its prediction to its end, and the prediction; `None` if they cannot be compared, as after another
    /// attempt.
    pub(crate) took: Option<(Duration, Prediction)>,
}

/// What one tenant's answers teach; it is never used against another tenant. Its answers may be long, or late behind its
/// own, only because it asks for that.
#[derive(Debug, Default)]
struct Tenant {
    /// Median length of its answers, estimated; `None` before the first.
    tokens: Option<f64>,
    /// Of those above its share or alone, and of those below: the latter do not wait for the former.
    times: [Times; 2],
}

#[derive(Debug, Default)]
struct Times {
    slowness: Learned,
    longest: Longest,
}

impl Tenant {
    fn times(&mut self, standing: Standing) -> &mut Times {
        &mut self.times[usize::from(standing.is_below)]
    }
}

/// Statistics of all answers of this router, by model and tenant; newer answers weigh more.
#[derive(Debug, Default)]
pub(crate) struct Experience(Mutex<BTreeMap<String, BTreeMap<TenantLabel, Tenant>>>);

impl Experience {
    /// Records an answer that ended now.
    pub(crate) fn learn(&self, model: &str, ended: &Ended, now: Instant) {
        let mut models = self.0.lock();
        if !models.contains_key(model) {
            if models.len() == MODELS_MAX {
                return;
            }
            models.insert(model.to_owned(), BTreeMap::new());
        }
        let Some(tenants) = models.get_mut(model) else { return };
        if tenants.len() == TENANTS_MAX && !tenants.contains_key(&ended.tenant) {
            return;
        }
        let known = tenants.entry(ended.tenant).or_default();
        let tokens = f64::from(ended.tokens);
        match &mut known.tokens {
            Some(median) if tokens > *median => *median *= 1.0 + LONGER_BY,
            Some(median) if tokens < *median && ended.finished => *median = (*median / (1.0 + LONGER_BY)).max(1.0),
            Some(_) => {}
            // A first answer that was cut off before its first token says nothing.
            None => known.tokens = (ended.finished || ended.tokens > 0).then_some(tokens.max(1.0)),
        }
        if let Some((took, predicted)) = ended.took {
            let slowness = &mut known.times(ended.standing).slowness;
            slowness.learn(predicted.ahead, took, predicted.end(ended.tokens), ended.finished, now);
        }
    }

    /// Expected tokens of a tenant's answer of at most `max`: the median of its answers, or 1 while none is known. The
    /// maximum would refuse clients that set none, and a few endless answers would distort a mean. An answer that was
    /// cut off counts only if it was longer than expected: otherwise long answers that miss their deadlines would not
    /// count.
    pub(crate) fn answer_tokens(&self, model: &str, tenant: TenantLabel, max: u32) -> u64 {
        let median = self.0.lock().get(model).and_then(|m| m.get(&tenant)?.tokens).unwrap_or(1.0);
        (median.round() as u64).clamp(1, u64::from(max.max(1)))
    }

    /// Records a request of a tenant that arrived, accepted or not. It would take `alone` on an idle cluster, and meet
    /// its deadline.
    pub(crate) fn offered(&self, model: &str, tenant: TenantLabel, standing: Standing, alone: Duration) {
        if let Some(known) = self.0.lock().get_mut(model).and_then(|m| m.get_mut(&tenant)) {
            known.times(standing).longest.learn(alone);
        }
    }

    /// The time that the longest recent requests of a tenant would take alone, and the factor by which its answers took
    /// longer than predicted.
    pub(crate) fn times(
        &self,
        model: &str,
        tenant: TenantLabel,
        standing: Standing,
        now: Instant,
    ) -> (Duration, Slowness) {
        let mut models = self.0.lock();
        let times = models.get_mut(model).and_then(|m| m.get_mut(&tenant)).map(|known| known.times(standing));
        times.map_or_else(Default::default, |times| (times.longest.get(), times.slowness.at(now)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantLabel = TenantLabel(1);
    const B: TenantLabel = TenantLabel(2);
    const BELOW: Standing = Standing { share: 0.5, is_below: true };

    fn answer(tokens: u32, finished: bool) -> Ended {
        Ended { tenant: A, standing: Standing::ALONE, tokens, finished, took: None }
    }

    #[test]
    fn answers_are_expected_as_long_as_those_before() {
        let (known, now) = (Experience::default(), Instant::now());
        assert_eq!(known.answer_tokens("m", A, 50), 1, "nothing is known");
        (0..100).for_each(|_| known.learn("m", &answer(20, true), now));
        assert_eq!((known.answer_tokens("m", A, 50), known.answer_tokens("other", A, 50)), (20, 1));
        (0..1000).for_each(|_| known.learn("m", &answer(400, true), now));
        assert_eq!(known.answer_tokens("m", A, 50), 50, "no longer than it may be");
        (0..1000).for_each(|_| known.learn("m", &answer(3, true), now));
        assert_eq!(known.answer_tokens("m", A, 50), 3);
    }

    #[test]
    fn long_answers_that_are_cut_off_are_not_forgotten() {
        let (known, now) = (Experience::default(), Instant::now());
        for _ in 0..200 {
            known.learn("m", &answer(10, true), now);
            known.learn("m", &answer(30, false), now);
        }
        (0..100).for_each(|_| known.learn("m", &answer(30, false), now));
        assert!((30..=32).contains(&known.answer_tokens("m", A, 50)), "{}", known.answer_tokens("m", A, 50));
        (0..100).for_each(|_| known.learn("m", &answer(5, false), now));
        assert!(known.answer_tokens("m", A, 50) >= 30, "what is cut off early may have become longer");
    }

    #[test]
    fn a_few_endless_answers_are_no_measure() {
        let (known, now) = (Experience::default(), Instant::now());
        (0..100).for_each(|_| known.learn("m", &answer(100, true), now));
        (0..3).for_each(|_| known.learn("m", &answer(100_000, false), now));
        assert!(known.answer_tokens("m", A, 1000) <= 120, "{}", known.answer_tokens("m", A, 1000));
    }

    #[test]
    fn slowness_is_of_its_model() {
        let (known, now) = (Experience::default(), Instant::now());
        let predicted = Prediction { first_token: Duration::from_secs(1), token: Duration::from_secs(1), ahead: 2 };
        let slow = Ended { took: Some((Duration::from_secs(4), predicted)), ..answer(3, true) };
        known.learn("m", &slow, now);
        let slowness = |model| known.times(model, A, Standing::ALONE, now).1;
        assert!(slowness("m").of(2) > 1.05, "three tokens were predicted within three seconds");
        assert_eq!(slowness("other"), Slowness::default());
    }

    #[test]
    fn what_one_tenant_teaches_is_not_used_against_another() {
        let (known, now, hour) = (Experience::default(), Instant::now(), Duration::from_secs(3600));
        let predicted = Prediction { first_token: Duration::from_secs(1), token: Duration::ZERO, ahead: 300 };
        let nothing = (Duration::ZERO, Slowness::default());
        known.learn("m", &Ended { tenant: B, ..answer(7, true) }, now);
        for standing in [Standing::ALONE, BELOW] {
            for _ in 0..100 {
                known.learn("m", &Ended { standing, took: Some((hour, predicted)), ..answer(4000, true) }, now);
                known.offered("m", A, standing, hour);
            }
            let (longest, slowness) = known.times("m", A, standing, now);
            assert!(longest > hour / 4 && slowness.of(300) > 2.0 && known.answer_tokens("m", A, 4096) == 4000);
            assert_eq!([Standing::ALONE, BELOW].map(|standing| known.times("m", B, standing, now)), [nothing; 2]);
            if standing == Standing::ALONE {
                assert_eq!(known.times("m", A, BELOW, now), nothing, "below its share it does not wait for its own");
            }
        }
        known.offered("m", B, BELOW, Duration::from_secs(2));
        assert_eq!(known.times("m", B, BELOW, now).0, Duration::from_secs(2));
        assert_eq!((known.answer_tokens("m", A, 4096), known.answer_tokens("m", B, 4096)), (4000, 7));
    }

    #[test]
    fn a_first_answer_without_a_token_teaches_its_time_alone() {
        let (known, now) = (Experience::default(), Instant::now());
        let predicted = Prediction { first_token: Duration::from_secs(1), token: Duration::ZERO, ahead: 0 };
        let late = Some((Duration::from_secs(9), predicted));
        known.learn("m", &Ended { took: late, ..answer(0, false) }, now);
        assert!(known.times("m", A, Standing::ALONE, now).1.of(0) > 1.05);
        known.learn("m", &answer(20, true), now);
        assert_eq!(known.answer_tokens("m", A, 50), 20);
    }

    #[test]
    fn tenants_are_bounded() {
        let (known, now) = (Experience::default(), Instant::now());
        (0..TENANTS_MAX as u64 + 9)
            .for_each(|n| known.learn("m", &Ended { tenant: TenantLabel(n), ..answer(5, true) }, now));
        assert_eq!(known.0.lock()["m"].len(), TENANTS_MAX);
        let expected = |n| known.answer_tokens("m", TenantLabel(n), 50);
        assert_eq!((expected(0), expected(TENANTS_MAX as u64)), (5, 1));
    }
}
