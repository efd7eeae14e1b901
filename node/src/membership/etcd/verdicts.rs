//! Routers' verdicts on this worker, as read from etcd. Pure.

use crate::membership::state::RouterVerdict;
use crate::membership::{RouterReport, WorkerState, aggregate};
use std::collections::{BTreeMap, BTreeSet};

/// Verdicts by router, and whether this worker is registered.
#[derive(Clone, Debug, Default)]
pub(super) struct Verdicts {
    registered: bool,
    /// Set while another process holds the name.
    refused: Option<String>,
    routers: BTreeMap<String, RouterReport>,
}

impl Verdicts {
    /// The record is in etcd.
    pub(super) fn registered(&mut self) {
        self.registered = true;
        self.refused = None;
    }

    /// Another process holds the name: all verdicts on this one are void.
    pub(super) fn refused(&mut self, reason: String) {
        *self = Self { registered: false, refused: Some(reason), routers: BTreeMap::new() };
    }

    /// All current verdicts; routers with an earlier verdict that are not in the list are lost.
    pub(super) fn listed(&mut self, verdicts: Vec<(String, RouterVerdict)>) {
        let standing: BTreeSet<_> = verdicts.iter().map(|(router, _)| router.clone()).collect();
        let lost: Vec<_> = self.routers.keys().filter(|r| !standing.contains(*r)).cloned().collect();
        lost.iter().for_each(|router| self.lost(router));
        verdicts.into_iter().for_each(|(router, verdict)| self.said(router, verdict));
    }

    /// A router's new verdict.
    pub(super) fn said(&mut self, router: String, verdict: RouterVerdict) {
        self.routers.insert(router, RouterReport { connected: true, verdict: Some(verdict) });
        self.forget();
    }

    /// The verdict was removed with its router's lease.
    pub(super) fn lost(&mut self, router: &str) {
        if let Some(report) = self.routers.get_mut(router) {
            report.connected = false;
        }
        self.forget();
    }

    /// Lost routers count only while no other is reachable, so at most as many are kept as were ever reachable
    /// together.
    fn forget(&mut self) {
        if self.routers.values().any(|r| r.connected) {
            self.routers.retain(|_, r| r.connected);
        }
    }

    /// The worker's state.
    pub(super) fn state(&self) -> WorkerState {
        if let Some(reason) = &self.refused {
            return WorkerState::Evicted(reason.clone());
        }
        let here = RouterReport { connected: self.registered, verdict: None };
        aggregate(&self.routers.values().cloned().chain([here]).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps: `reg`, `no` (refused), `+a` (router a admits), `!a` (evicts), `-a` (a is lost), `=ab` (a list: a and b
    /// admit).
    fn state(steps: &str) -> String {
        let mut verdicts = Verdicts::default();
        for step in steps.split_whitespace() {
            let (op, router) = step.split_at(1);
            match (op, step) {
                (_, "reg") => verdicts.registered(),
                (_, "no") => verdicts.refused("taken".into()),
                ("+", _) => verdicts.said(router.into(), RouterVerdict::Admitted),
                ("!", _) => verdicts.said(router.into(), RouterVerdict::Evicted(router.into())),
                ("-", _) => verdicts.lost(router),
                _ => verdicts.listed(router.chars().map(|r| (r.to_string(), RouterVerdict::Admitted)).collect()),
            }
        }
        format!("{:?}", verdicts.state())
    }

    #[test]
    fn readiness_is_sticky_and_evictions_clear_it() {
        let check = |steps: &str, expected: &str| assert_eq!(state(steps), expected, "{steps}");
        check("", "Unregistered");
        check("reg", "Registered");
        check("reg +a", "Admitted");
        check("reg +a -a", "Admitted");
        check("reg +a =", "Admitted");
        check("reg +a !a", r#"Evicted("a")"#);
        check("reg +a !b", "Admitted");
        // The router that admitted is lost, so the reachable one decides, and its verdict stays in force when it is
        // lost, too.
        check("reg +a !b -a", r#"Evicted("b")"#);
        check("reg +a !b -a -b", r#"Evicted("b")"#);
        check("reg +a -a !b -b", r#"Evicted("b")"#);
        check("reg !a -a =b", "Admitted");
        check("reg +a no", r#"Evicted("taken")"#);
        check("reg +a no reg", "Registered");
    }
}
