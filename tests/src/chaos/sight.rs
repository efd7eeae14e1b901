//! The phases of the requests at the part that is about to fail.

use super::faults::Target;
use super::load::Load;
use super::matrix::Phase;
use super::stage::{Node, Stage};
use crate::scrape::Scrape;
use baton_proto::v1::PrefillPolicy;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::timeout;

/// Longest time of a check: a later result would be outdated.
const LOOK_MAX: Duration = Duration::from_millis(250);

/// One request, as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flight {
    /// Number of its router.
    pub router: usize,
    /// Tokens received.
    pub tokens: usize,
    /// Where it may be prefilled.
    pub policy: PrefillPolicy,
}

/// Phases of the requests at `target` now.
pub async fn phases(target: Target, stage: &Stage, load: &Load) -> BTreeSet<Phase> {
    match target {
        Target::Node(Node::Router(number)) | Target::RouterRegistry(number) => {
            of_flights(load.flights().iter().filter(|f| f.router == number))
        }
        Target::Etcd(_) | Target::AllEtcd => of_flights(load.flights().iter()),
        Target::Node(node) | Target::OneWay(_, node, _) => at(stage, node).await,
        Target::Links(_, prefill, decode) => {
            let (a, b) = tokio::join!(at(stage, Node::Prefill(prefill)), at(stage, Node::Decode(decode)));
            a.into_iter().chain(b).collect()
        }
    }
}

fn of_flights<'a>(flights: impl Iterator<Item = &'a Flight>) -> BTreeSet<Phase> {
    flights.filter_map(Flight::phase).collect()
}

impl Flight {
    /// The phase as far as the client knows: after one token of a request that the router places, there may or may not be a handoff.
    fn phase(&self) -> Option<Phase> {
        match (self.tokens, self.policy) {
            (0, _) => Some(Phase::Waiting),
            (1, PrefillPolicy::Remote) => Some(Phase::Transfer),
            (1, PrefillPolicy::Auto) => None,
            _ => Some(Phase::Decode),
        }
    }
}

/// A worker's phases; empty if it cannot be reached.
async fn at(stage: &Stage, worker: Node) -> BTreeSet<Phase> {
    let look = async {
        let scrape = Scrape::of(&stage.metrics(worker)).await?;
        let claimed = if let Node::Decode(_) = worker { stage.claimed_tokens(worker).await? } else { 0 };
        let has = |name: &str| anyhow::Ok(scrape.find(name, &[])? > 0.0);
        let (runs, queued) = (has("baton_sequences_running")?, has("baton_sequences_waiting")?);
        let handoffs = has("baton_kv_put_sources")? || has("baton_kv_put_sinks")?;
        anyhow::Ok((runs, queued, has("baton_waiting_tokens")?, handoffs, claimed))
    };
    let Ok(Ok((runs, queued, uncomputed, handoffs, claimed))) = timeout(LOOK_MAX, look).await else {
        return BTreeSet::new();
    };
    let decodes = matches!(worker, Node::Decode(_));
    let seen = [
        (Phase::Waiting, queued || claimed > 0),
        // A request queued on a decode worker has tokens to compute, too.
        (Phase::Prefill, runs && uncomputed && !(decodes && queued)),
        (Phase::Transfer, handoffs),
        (Phase::Decode, decodes && runs && !uncomputed),
    ];
    seen.into_iter().filter(|(_, seen)| *seen).map(|(phase, _)| phase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_sees_a_transfer_only_where_there_must_be_one() {
        let phase = |tokens, policy| Flight { router: 0, tokens, policy }.phase();
        for policy in [PrefillPolicy::Remote, PrefillPolicy::Auto, PrefillPolicy::Local] {
            assert_eq!((phase(0, policy), phase(2, policy)), (Some(Phase::Waiting), Some(Phase::Decode)));
        }
        assert_eq!(phase(1, PrefillPolicy::Remote), Some(Phase::Transfer));
        assert_eq!(phase(1, PrefillPolicy::Local), Some(Phase::Decode));
        assert_eq!(phase(1, PrefillPolicy::Auto), None);
    }
}
