//! Whom a request asks next after workers failed it.

use super::{Avoid, Retry};
use baton_types::{InstanceRecord, Party, Role};

/// Workers that failed one request, and whether they may be asked again.
#[derive(Debug, Default)]
pub(crate) struct Avoided {
    workers: Vec<(Party, Avoid)>,
    /// Prefill and decode workers of attempts that the prefill worker may have failed: its way to that decode worker may be what is broken.
    pairs: Vec<(Party, Party)>,
}

/// Ever wider circles of workers: the next one is asked where nothing fits in those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Circle {
    /// Nobody failed anybody.
    Trusted,
    /// Nobody failed this request.
    Untried,
    /// A decode worker that failed is tried again, and without a prefill worker that failed.
    DecodersAgain,
    /// All workers, but no two that failed together: where links are broken, another pair may be whole.
    OtherPairs,
    /// Everybody who may be asked at all.
    All,
}

impl Circle {
    /// In the order in which they are asked.
    pub(crate) const WIDENING: [Self; 5] =
        [Self::Trusted, Self::Untried, Self::DecodersAgain, Self::OtherPairs, Self::All];
}

impl Avoided {
    /// An attempt on these two failed, the prompt to be computed by the decode worker where there is no other; `retry` says who may be at
    /// fault.
    pub(crate) fn failed(&mut self, prefill: Option<&Party>, decode: &Party, retry: &Retry) {
        self.workers.extend(retry.avoids(prefill, decode).map(|(party, how)| (party.clone(), how)));
        if retry.started {
            // Such an answer is carried on wherever there may be room by now.
            self.workers.iter_mut().for_each(|(_, how)| *how = Avoid::Softly);
        }
        if let Some(prefill) = prefill.filter(|_| retry.prefill.is_some()) {
            self.pairs.push((prefill.clone(), decode.clone()));
        }
    }

    /// Whether a worker is in the circle. `on_probation`: it failed other requests of late.
    pub(crate) fn admits(&self, party: &Party, role: Role, on_probation: bool, circle: Circle) -> bool {
        let is_avoided = || self.workers.iter().any(|(p, _)| p == party);
        if self.excludes(party) {
            return false;
        }
        match circle {
            Circle::Trusted => !is_avoided() && !on_probation,
            Circle::Untried => !is_avoided(),
            Circle::DecodersAgain => role == Role::Decode || !is_avoided(),
            Circle::OtherPairs | Circle::All => true,
        }
    }

    /// Whether one of the workers that are `ready` may be what is missing, and is asked no more: another may not come.
    pub(crate) fn excludes_missing<'a>(
        &self,
        missing: Option<Role>,
        ready: impl IntoIterator<Item = &'a InstanceRecord>,
    ) -> bool {
        ready.into_iter().any(|worker| Some(worker.role) == missing && self.excludes(&worker.party))
    }

    /// Whether a worker is in no circle: it was full when this request asked.
    fn excludes(&self, party: &Party) -> bool {
        self.workers.iter().any(|(p, how)| p == party && *how == Avoid::Strictly)
    }

    /// Decode workers that a prefill worker is not to be paired with in the circle.
    pub(crate) fn not_with(&self, prefill: &Party, circle: Circle) -> Vec<Party> {
        let failed = self.pairs.iter().filter(|(p, _)| p == prefill && circle != Circle::All);
        failed.map(|(_, decode)| decode.clone()).collect()
    }
}
