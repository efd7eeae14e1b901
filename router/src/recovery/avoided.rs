//! Which workers a request may retry after failures.

use super::{Avoid, Retry};
use baton_types::{InstanceRecord, Party, Role};

/// Workers that failed one request, and whether they may be asked again.
#[derive(Debug, Default)]
pub(crate) struct Avoided {
    workers: Vec<(Party, Avoid)>,
    /// Prefill and decode workers of attempts in which the prefill worker may have failed: the link between the two may
    /// be broken.
    pairs: Vec<(Party, Party)>,
}

/// Retry scopes, each wider than the one before: the next is tried if no worker of the narrower ones fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CandidateSet {
    /// Workers without a recent failure.
    Trusted,
    /// Workers that have not failed this request.
    Untried,
    /// Decode workers that failed are tried again, but not with a prefill worker that failed.
    DecodersAgain,
    /// All workers, except pairs that failed together: if a link is broken, another pair may work.
    OtherPairs,
    /// All workers that may be asked at all.
    All,
}

impl CandidateSet {
    /// In the order in which they are tried.
    pub(crate) const WIDENING: [Self; 5] =
        [Self::Trusted, Self::Untried, Self::DecodersAgain, Self::OtherPairs, Self::All];
}

impl Avoided {
    /// Records a failed attempt on these workers; without `prefill` the decode worker prefilled. `retry` says which of
    /// them may be at fault.
    pub(crate) fn failed(&mut self, prefill: Option<&Party>, decode: &Party, retry: &Retry) {
        self.workers.extend(retry.avoids(prefill, decode).map(|(party, how)| (party.clone(), how)));
        if retry.started {
            // An answer that has begun may continue on any worker that may have room now.
            self.workers.iter_mut().for_each(|(_, how)| *how = Avoid::Softly);
        }
        if let Some(prefill) = prefill.filter(|_| retry.prefill.is_some()) {
            self.pairs.push((prefill.clone(), decode.clone()));
        }
    }

    /// Whether a worker is in the scope. `on_probation`: it recently failed other requests.
    pub(crate) fn admits(&self, party: &Party, role: Role, on_probation: bool, set: CandidateSet) -> bool {
        let is_avoided = || self.workers.iter().any(|(p, _)| p == party);
        if self.excludes(party) {
            return false;
        }
        match set {
            CandidateSet::Trusted => !is_avoided() && !on_probation,
            CandidateSet::Untried => !is_avoided(),
            CandidateSet::DecodersAgain => role == Role::Decode || !is_avoided(),
            CandidateSet::OtherPairs | CandidateSet::All => true,
        }
    }

    /// Whether one of the `ready` workers could serve in the missing role, but this request must not ask it again.
    /// There may be no other.
    pub(crate) fn excludes_missing<'a>(
        &self,
        missing: Option<Role>,
        ready: impl IntoIterator<Item = &'a InstanceRecord>,
    ) -> bool {
        ready.into_iter().any(|worker| Some(worker.role) == missing && self.excludes(&worker.party))
    }

    /// Whether a worker is in no scope: it was full when this request asked.
    fn excludes(&self, party: &Party) -> bool {
        self.workers.iter().any(|(p, how)| p == party && *how == Avoid::Strictly)
    }

    /// Decode workers that a prefill worker must not be paired with in the scope.
    pub(crate) fn not_with(&self, prefill: &Party, set: CandidateSet) -> Vec<Party> {
        let failed = self.pairs.iter().filter(|(p, _)| p == prefill && set != CandidateSet::All);
        failed.map(|(_, decode)| decode.clone()).collect()
    }
}
