//! Workers that could run a request.

use super::choose::{RETRY_SOON, duration, retry_after};
use super::cost::Costs;
use super::{Demand, Refusal, Worker};
use crate::request::PrefillPolicy;
use baton_types::Role;
use std::collections::HashMap;
use std::time::Duration;

/// A decode worker, and the compatible prefill workers with room in their queue: at least one.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    pub(super) decode: usize,
    /// Index of its partners' list in [`Pairs::partners`].
    pub(super) partners: usize,
}

/// Candidate pairs. Decode workers with the same compatibility share one list of partners.
pub(super) struct Pairs {
    pub(super) partners: Vec<Vec<usize>>,
    pub(super) pairs: Vec<Pair>,
}

impl Pairs {
    /// The partners of a decode worker that has some.
    pub(super) fn partners_of(&self, decode: usize) -> &[usize] {
        let pair = self.pairs.iter().find(|pair| pair.decode == decode);
        pair.map_or(&[], |pair| &self.partners[pair.partners])
    }
}

/// Candidates for a request that is to be prefilled remotely.
pub(super) enum Found {
    /// The candidate pairs. A decode worker with a partner is preferred to one without.
    Some(Pairs),
    /// Compatible prefill workers exist, but their queues are full.
    Full {
        /// Time until the first of them could have computed it.
        soonest: Duration,
    },
    /// No compatible prefill worker.
    Nobody,
}

impl Found {
    /// The refusal if no other placement is possible.
    pub(super) fn refusal(&self) -> Refusal {
        match self {
            Self::Full { soonest } => Refusal::Full { retry_after: retry_after(*soonest) },
            _ => Refusal::NoPrefillWorker,
        }
    }
}

/// Compatibility of workers, checked once per pair of groups.
struct Compatibility<'a> {
    workers: &'a [Worker],
    known: HashMap<(u32, u32), bool>,
}

impl Compatibility<'_> {
    fn of(&mut self, decode: usize, prefill: usize) -> bool {
        let (decode, prefill) = (&self.workers[decode], &self.workers[prefill]);
        let check = || decode.record.check_partner(&prefill.record).is_ok();
        match (decode.group, prefill.group) {
            (Some(d), Some(p)) => *self.known.entry((d, p)).or_insert_with(check),
            _ => check(),
        }
    }

    /// Whether this request's KV may come from that prefill worker.
    fn fits(&mut self, decode: usize, prefill: usize) -> bool {
        let is_refused = self.workers[prefill].not_with.contains(&self.workers[decode].record.party);
        !is_refused && self.of(decode, prefill)
    }
}

/// The pairs among these decode workers.
pub(super) fn pairs(costs: &Costs<'_>, decoders: &[usize]) -> Found {
    let Costs { workers, demand, .. } = *costs;
    let prefillers: Vec<usize> =
        with_role(workers, Role::Prefill).filter(|&p| workers[p].tokens_max() >= demand.prefill_tokens()).collect();
    let roomy: Vec<usize> =
        prefillers.iter().copied().filter(|&p| workers[p].queue_has_room(demand.standing)).collect();
    let wary: Vec<usize> = roomy.iter().copied().filter(|&p| !workers[p].not_with.is_empty()).collect();
    let mut compatibility = Compatibility { workers, known: HashMap::new() };
    let mut found = Pairs { partners: Vec::new(), pairs: Vec::new() };
    // Partners of the decode workers of a group; `None` if they have none.
    let mut of_group: HashMap<u32, Option<usize>> = HashMap::new();
    for &decode in decoders {
        let is_refused = |p: &usize| workers[*p].not_with.contains(&workers[decode].record.party);
        let group = workers[decode].group.filter(|_| !wary.iter().any(is_refused));
        let partners = group.and_then(|group| of_group.get(&group)).copied().unwrap_or_else(|| {
            let partners: Vec<usize> = roomy.iter().copied().filter(|&p| compatibility.fits(decode, p)).collect();
            let index = (!partners.is_empty()).then_some(found.partners.len());
            found.partners.extend(index.map(|_| partners));
            of_group.extend(group.map(|group| (group, index)));
            index
        });
        found.pairs.extend(partners.map(|partners| Pair { decode, partners }));
    }
    if !found.pairs.is_empty() {
        return Found::Some(found);
    }
    if !decoders.iter().any(|&d| prefillers.iter().any(|&p| compatibility.fits(d, p))) {
        return Found::Nobody;
    }
    let soonest = prefillers.iter().map(|&p| costs.alone(p, 0.0).first_token_s).fold(f64::INFINITY, f64::min);
    Found::Full { soonest: duration(soonest) }
}

/// Decode workers that accept a sequence of this length and have room in their queue. Refuses a sequence that no idle
/// worker would accept.
pub(super) fn decoders(workers: &[Worker], demand: &Demand) -> Result<Vec<usize>, Refusal> {
    let longest = |role| with_role(workers, role).map(|w| workers[w].tokens_max()).max();
    let tokens_max = longest(Role::Decode).ok_or(Refusal::NoDecodeWorker)?;
    if tokens_max < demand.total_tokens {
        return Err(Refusal::NeverFits { tokens_max });
    }
    if let Some(tokens_max) = longest(Role::Prefill)
        && demand.policy == PrefillPolicy::Remote
        && tokens_max < demand.prefill_tokens()
    {
        let prompt_tokens_max = (tokens_max + demand.prompt_tokens).saturating_sub(demand.prefill_tokens());
        return Err(Refusal::NeverPrefilled { prompt_tokens: demand.prompt_tokens, prompt_tokens_max });
    }
    let open: Vec<usize> = with_role(workers, Role::Decode)
        .filter(|&d| workers[d].tokens_max() >= demand.total_tokens && workers[d].queue_has_room(demand.standing))
        .collect();
    if open.is_empty() { Err(Refusal::Full { retry_after: RETRY_SOON }) } else { Ok(open) }
}

fn with_role(workers: &[Worker], role: Role) -> impl Iterator<Item = usize> {
    workers.iter().enumerate().filter(move |(_, w)| w.has_role(role)).map(|(i, _)| i)
}
