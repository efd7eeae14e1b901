//! The state of a worker with its routers. Pure.

pub(super) use baton_proto::convert::stored::RouterVerdict;

/// A router's last verdict, and whether the router is reachable now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterReport {
    pub connected: bool,
    /// Its last verdict; outlives the connection.
    pub verdict: Option<RouterVerdict>,
}

/// The state of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkerState {
    /// No router knows it.
    #[default]
    Unregistered,
    /// Registered, without a verdict of any router.
    Registered,
    /// Admitted. Stays admitted when routers are lost.
    Admitted,
    /// Evicted or refused, with the reason.
    Evicted(String),
}

impl WorkerState {
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Admitted)
    }
}

/// Combines the routers' verdicts. Reachable routers decide, and one admission is enough. If these have no verdict, the
/// last verdicts of lost routers stay in force.
pub fn aggregate(routers: &[RouterReport]) -> WorkerState {
    let verdict = |connected: bool| {
        let verdicts = || routers.iter().filter(|r| r.connected == connected).filter_map(|r| r.verdict.as_ref());
        let evicted = || {
            verdicts().find_map(|w| {
                if let RouterVerdict::Evicted(reason) = w { Some(WorkerState::Evicted(reason.clone())) } else { None }
            })
        };
        verdicts().any(|w| *w == RouterVerdict::Admitted).then_some(WorkerState::Admitted).or_else(evicted)
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
            let verdict =
                |w: &str| if w == "admitted" { RouterVerdict::Admitted } else { RouterVerdict::Evicted(w.into()) };
            let routers: Vec<_> =
                routers.iter().map(|&(connected, w)| RouterReport { connected, verdict: w.map(verdict) }).collect();
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
        // nor does their return before they have a new verdict.
        check(&[(false, Some("admitted")), (true, None)], "Admitted");
        // A reachable router's eviction overrides a lost one's admission.
        check(&[(false, Some("admitted")), (true, Some("unreachable"))], r#"Evicted("unreachable")"#);
    }
}
