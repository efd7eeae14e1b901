//! Decides whether all promises were kept. Which requests had to succeed depends only on the injected faults, never on what the cluster
//! reports of itself.

use super::stage::Node;
use baton_types::ErrorKind;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

/// The nodes and time that a fault affects, from just before its injection until its repair has settled.
#[derive(Clone, Debug)]
struct Touch {
    what: String,
    nodes: Vec<Node>,
    from: Instant,
    to: Option<Instant>,
}

impl Touch {
    fn overlaps(&self, from: Instant, to: Instant) -> bool {
        self.from <= to && self.to.is_none_or(|end| end >= from)
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// Every token, and the bits of its log-probability, equal the undisturbed answer.
    Right,
    /// Its client cancelled on purpose; what was received until then was right.
    Cancelled,
    /// An error, with its text.
    Failed(String),
    /// Tokens that differ from the undisturbed answer.
    Wrong(String),
    /// Neither answer nor error, long after its deadline.
    Endless,
}

/// The data of a request that ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The request's name in reports.
    pub name: String,
    /// When it was sent first.
    pub sent: Instant,
    /// Whether it required a prefill worker.
    pub remote: bool,
    /// How often its client retried, on another router or after a wait.
    pub resent: u32,
    /// How it ended.
    pub end: End,
}

/// One try of a request at one router.
#[derive(Clone, Debug)]
pub struct Try {
    /// The request's name in reports.
    pub name: String,
    /// The router that was called.
    pub router: Node,
    /// Whether it requires a prefill worker.
    pub remote: bool,
    pub from: Instant,
}

/// Counts of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Requests that ended in any way.
    pub finished: u64,
    /// Bit for bit right.
    pub right: u64,
    /// Cancelled by their clients.
    pub cancelled: u64,
    /// Failed with an error, although some path was live throughout.
    pub failed_live: u64,
    /// Failed with an error while no path was live throughout.
    pub failed_dark: u64,
    /// Ended with wrong tokens.
    pub wrong: u64,
    /// Endless.
    pub endless: u64,
    /// Right or failed, with a path that was live throughout.
    pub live: u64,
    /// Retried by their client.
    pub resent: u64,
    /// Tries after which a client had to retry, by the router's answer and its excuse.
    pub again: BTreeMap<String, u64>,
    /// Those without an excuse.
    pub unexcused: u64,
}

impl Tally {
    /// Adds another's counts.
    pub fn add(&mut self, other: &Self) {
        self.finished += other.finished;
        self.right += other.right;
        self.cancelled += other.cancelled;
        self.failed_live += other.failed_live;
        self.failed_dark += other.failed_dark;
        self.wrong += other.wrong;
        self.endless += other.endless;
        self.live += other.live;
        self.resent += other.resent;
        self.unexcused += other.unexcused;
        for (why, n) in &other.again {
            *self.again.entry(why.clone()).or_default() += n;
        }
    }
}

/// A promise that was broken.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Breach {
    /// Seconds since the run began.
    pub at_s: f64,
    /// What happened, with everything needed to understand it.
    pub what: String,
    /// Faults at that time.
    pub faults: Vec<String>,
    /// Processes whose logs have details.
    pub processes: BTreeSet<String>,
}

/// Most breaches kept: the first ones are the most useful.
const BREACHES_MAX: usize = 50;

/// Receives all events of a run.
pub struct Judge {
    start: Instant,
    patience: u32,
    touches: Mutex<Vec<Touch>>,
    tally: Mutex<Tally>,
    breaches: Mutex<Vec<Breach>>,
}

/// An active fault; [`Judge::settled`] ends it.
#[derive(Debug)]
pub struct Acting(usize);

impl Judge {
    /// Without events.
    pub fn new(start: Instant) -> Self {
        Self { start, patience: 1, touches: Mutex::default(), tally: Mutex::default(), breaches: Mutex::default() }
    }

    /// One that lets everything take so many times longer than promised.
    pub fn with_patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    /// The longest time of what is promised within `promised`.
    pub fn allows(&self, promised: Duration) -> Duration {
        promised * self.patience
    }

    /// A fault is about to be injected into these nodes.
    pub fn begin_fault(&self, what: String, nodes: Vec<Node>) -> Acting {
        let mut touches = self.touches.lock();
        touches.push(Touch { what, nodes, from: Instant::now(), to: None });
        Acting(touches.len() - 1)
    }

    /// Its repair has settled.
    pub fn settled(&self, acting: &Acting) {
        self.touches.lock()[acting.0].to = Some(Instant::now());
    }

    /// Whether a fault, other than `acting`, touched `node` since then.
    pub fn touched_since(&self, since: Instant, node: Node, acting: Option<&Acting>) -> bool {
        let touches = self.touches.lock();
        let others = touches.iter().enumerate().filter(|(index, _)| acting.is_none_or(|acting| *index != acting.0));
        others.map(|(_, t)| t).any(|t| t.nodes.contains(&node) && t.overlaps(since, Instant::now()))
    }

    /// Whether some router, some decode worker and, for `remote` requests, some prefill worker were untouched throughout.
    fn live(&self, from: Instant, to: Instant, remote: bool) -> bool {
        let touches = self.touches.lock();
        let touched: BTreeSet<Node> =
            touches.iter().filter(|t| t.overlaps(from, to)).flat_map(|t| t.nodes.iter().copied()).collect();
        let any = |of: fn(&Node) -> bool| Node::ALL.iter().any(|node| of(node) && !touched.contains(node));
        any(|n| matches!(n, Node::Router(_)))
            && any(|n| matches!(n, Node::Decode(_)))
            && (!remote || any(|n| matches!(n, Node::Prefill(_))))
    }

    /// Counts a retry because a router was full, which is allowed at any time.
    pub fn put_off(&self) {
        *self.tally.lock().again.entry(ErrorKind::Overloaded.name().into()).or_default() += 1;
    }

    /// A router did not serve a try, for the reason `what`. That is allowed only if a fault touched it meanwhile, or if no path was live.
    pub fn turned_away(&self, Try { name, router, remote, from }: Try, what: &str, why: &str) {
        let now = Instant::now();
        let touched = self.touches.lock().iter().any(|t| t.nodes.contains(&router) && t.overlaps(from, now));
        let excuse = match (touched, self.live(from, now, remote)) {
            (true, _) => "that router met a fault",
            (false, false) => "no path was alive",
            (false, true) => "nothing excuses it",
        };
        let is_broken = excuse == "nothing excuses it";
        let mut tally = self.tally.lock();
        *tally.again.entry(format!("{what}, {excuse}")).or_default() += 1;
        tally.unexcused += u64::from(is_broken);
        drop(tally);
        if is_broken {
            let what = format!("{name} was turned away by {router} although a path was alive: {why}");
            self.breach((from, now), what);
        }
    }

    pub fn ended(&self, request: Ended) {
        let now = Instant::now();
        let live = self.live(request.sent, now, request.remote);
        let mut tally = self.tally.lock();
        tally.finished += 1;
        tally.resent += u64::from(request.resent > 0);
        tally.live += u64::from(live && matches!(request.end, End::Right | End::Failed(_)));
        let broken = match request.end {
            End::Right => {
                tally.right += 1;
                None
            }
            End::Cancelled => {
                tally.cancelled += 1;
                None
            }
            End::Failed(why) if live => {
                tally.failed_live += 1;
                Some(format!("failed although a path was alive: {why}"))
            }
            End::Failed(why) => {
                tally.failed_dark += 1;
                println!("{:>7.1} s  {} had no live path: {why}", self.at_s(), request.name);
                None
            }
            End::Wrong(how) => {
                tally.wrong += 1;
                Some(format!("is wrong: {how}"))
            }
            End::Endless => {
                tally.endless += 1;
                Some("has no end".into())
            }
        };
        drop(tally);
        if let Some(broken) = broken {
            self.breach((request.sent, now), format!("{} after {:.1?} {broken}", request.name, now - request.sent));
        }
    }

    /// Records a broken promise, with the faults between these times.
    pub fn breach(&self, (from, to): (Instant, Instant), what: String) {
        let touches = self.touches.lock();
        let near: Vec<&Touch> = touches.iter().filter(|t| t.overlaps(from, to)).collect();
        let since = |at: Instant| (at - self.start).as_secs_f64();
        let describe = |t: &&Touch| {
            let end = t.to.map_or("now".to_owned(), |to| format!("{:.1} s", since(to)));
            format!("{} from {:.1} s to {end}", t.what, since(t.from))
        };
        let routers = Node::ALL.iter().filter(|n| matches!(n, Node::Router(_)));
        let processes = near.iter().flat_map(|t| &t.nodes).chain(routers).map(ToString::to_string).collect();
        let breach = Breach { at_s: since(to), what, faults: near.iter().map(describe).collect(), processes };
        println!("{breach}");
        let mut breaches = self.breaches.lock();
        if breaches.len() < BREACHES_MAX {
            breaches.push(breach);
        }
    }

    /// Seconds since the run began.
    pub fn at_s(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Counts so far.
    pub fn tally(&self) -> Tally {
        self.tally.lock().clone()
    }

    /// Breaches so far.
    pub fn breaches(&self) -> Vec<Breach> {
        self.breaches.lock().clone()
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>7.1} s  BROKEN: {}\n           faults: {}", self.at_s, self.what, self.faults.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn ended(judge: &Judge, remote: bool, sent: Instant) {
        let end = End::Failed("no".into());
        judge.ended(Ended { name: "one".into(), sent, remote, resent: 0, end });
    }

    #[test]
    fn a_failure_is_a_breach_where_a_path_was_alive() {
        let judge = Judge::new(Instant::now() - Duration::from_secs(10));
        let sent = Instant::now();
        let first = judge.begin_fault("d-0 killed".into(), vec![Node::Decode(0), Node::Prefill(0)]);
        ended(&judge, true, sent);
        assert_eq!((judge.tally().failed_live, judge.breaches().len()), (1, 1), "the other pair was alive");
        let second = judge.begin_fault("p-1 killed".into(), vec![Node::Prefill(1)]);
        ended(&judge, true, sent);
        ended(&judge, false, sent);
        assert_eq!((judge.tally().failed_live, judge.tally().failed_dark), (2, 1), "local prefill was alive");
        assert!(judge.touched_since(sent, Node::Prefill(1), Some(&first)));
        judge.settled(&first);
        judge.settled(&second);
        ended(&judge, true, sent);
        assert_eq!(judge.tally().failed_dark, 2, "both prefill workers were touched while it ran");
        std::thread::sleep(Duration::from_millis(2));
        ended(&judge, true, Instant::now());
        assert_eq!(judge.tally().failed_live, 3);
    }

    #[test]
    fn a_client_may_be_sent_away_by_a_router_that_is_touched_or_without_a_live_path() {
        let judge = Judge::new(Instant::now() - Duration::from_secs(10));
        let away = |router, remote| {
            let asked = Try { name: "one".into(), router: Node::Router(router), remote, from: Instant::now() };
            judge.turned_away(asked, "unavailable", "no worker");
            (judge.tally().unexcused, judge.breaches().len())
        };
        assert_eq!(away(0, false), (1, 1), "nothing is broken");
        let router = judge.begin_fault("r-0 killed".into(), vec![Node::Router(0)]);
        assert_eq!(away(0, false), (1, 1), "it was touched");
        assert_eq!(away(1, false), (2, 2), "the other one was not");
        judge.settled(&router);
        std::thread::sleep(Duration::from_millis(2));
        let all = judge.begin_fault("both".into(), vec![Node::Prefill(0), Node::Prefill(1)]);
        assert_eq!(away(0, true), (2, 2), "it insists on a prefill worker");
        assert_eq!(away(0, false), (3, 3), "decode workers were alive");
        judge.settled(&all);
        judge.put_off();
        let counts = [("overloaded", 1), ("unavailable, no path was alive", 1), ("unavailable, nothing excuses it", 3)];
        assert!(counts.iter().all(|(why, n)| judge.tally().again.get(*why) == Some(n)), "{:?}", judge.tally());
    }
}
