//! Where a worker stands with its routers. Pure.

pub(super) use baton_proto::convert::stored::Word;

/// What one router said last, and whether it can be heard now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterOpinion {
    pub connected: bool,
    /// Its last word; outlives the connection.
    pub word: Option<Word>,
}

/// Where a worker stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkerState {
    /// No router knows of it.
    #[default]
    Unregistered,
    /// Registered, and no router has judged it yet.
    Registered,
    /// Admitted. Stays so when routers are lost.
    Admitted,
    /// Evicted or refused, and why.
    Evicted(String),
}

impl WorkerState {
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Admitted)
    }
}

/// Sums up the routers. Those that can be heard decide, one admission being enough; where they are silent, the last words of the
/// lost ones stand.
pub fn aggregate(routers: &[RouterOpinion]) -> WorkerState {
    let verdict = |connected: bool| {
        let words = || routers.iter().filter(|r| r.connected == connected).filter_map(|r| r.word.as_ref());
        let evicted = || {
            words().find_map(|w| {
                if let Word::Evicted(reason) = w { Some(WorkerState::Evicted(reason.clone())) } else { None }
            })
        };
        words().any(|w| *w == Word::Admitted).then_some(WorkerState::Admitted).or_else(evicted)
    };
    let unjudged =
        if routers.iter().any(|r| r.connected) { WorkerState::Registered } else { WorkerState::Unregistered };
    verdict(true).or_else(|| verdict(false)).unwrap_or(unjudged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_that_can_be_heard_decide() {
        let check = |routers: &[(bool, Option<&str>)], expected: &str| {
            let word = |w: &str| if w == "admitted" { Word::Admitted } else { Word::Evicted(w.into()) };
            let routers: Vec<_> =
                routers.iter().map(|&(connected, w)| RouterOpinion { connected, word: w.map(word) }).collect();
            assert_eq!(format!("{:?}", aggregate(&routers)), expected, "{routers:?}");
        };
        check(&[], "Unregistered");
        check(&[(false, None)], "Unregistered");
        check(&[(false, None), (true, None)], "Registered");
        check(&[(true, Some("admitted")), (true, Some("full"))], "Admitted");
        check(&[(true, Some("unreachable")), (true, None)], r#"Evicted("unreachable")"#);
        // Sticky: the loss of all routers changes nothing,
        check(&[(false, Some("admitted")), (false, None)], "Admitted");
        check(&[(false, Some("unreachable"))], r#"Evicted("unreachable")"#);
        // nor does their return before they have judged again.
        check(&[(false, Some("admitted")), (true, None)], "Admitted");
        // A living router's eviction outweighs a lost one's admission.
        check(&[(false, Some("admitted")), (true, Some("unreachable"))], r#"Evicted("unreachable")"#);
    }
}
