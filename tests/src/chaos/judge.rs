//! What was promised, and whether it was kept. Which requests had to succeed is decided here, from what was done to the cluster, never
//! from what the cluster says of itself.

use super::stage::Node;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;
use std::time::Instant;

/// A fault's hold on parts of the cluster, from just before it strikes until its repair has settled.
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
    /// Every token and the bits of its log-probability as undisturbed.
    Right,
    /// Its client went, as it wanted to; what came until then was right.
    Cancelled,
    /// An error, in words.
    Failed(String),
    /// Other tokens than undisturbed.
    Wrong(String),
    /// Neither answer nor error, long after its deadline.
    Endless,
}

/// What is known of a request that ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// How a person would look it up.
    pub name: String,
    /// When it was sent first.
    pub sent: Instant,
    /// Whether it insisted on a prefill worker.
    pub remote: bool,
    /// How often its client sent it again, to another router or after a wait.
    pub resent: u32,
    /// How it ended.
    pub end: End,
}

/// Counts of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tally {
    /// Requests that ended, in whatever way.
    pub finished: u64,
    /// Right to the last bit.
    pub right: u64,
    /// Cancelled by their clients.
    pub cancelled: u64,
    /// Failed with an error, although some path was alive throughout.
    pub failed_live: u64,
    /// Failed with an error while no path was alive throughout.
    pub failed_dark: u64,
    /// Ended with other tokens.
    pub wrong: u64,
    /// Without an end.
    pub endless: u64,
    /// Right or failed, with a path that was alive throughout.
    pub live: u64,
    /// Sent more than once by their client.
    pub resent: u64,
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
    }
}

/// A promise that was broken.
#[derive(Clone, Debug, Serialize)]
pub struct Breach {
    /// Seconds since the run began.
    pub at_s: f64,
    /// What, with everything needed to understand it.
    pub what: String,
    /// Faults at that time.
    pub faults: Vec<String>,
    /// Processes whose logs tell more.
    pub processes: BTreeSet<String>,
}

/// Most breaches kept: the first ones tell.
const BREACHES_MAX: usize = 50;

/// Listens to all that happens.
pub struct Judge {
    start: Instant,
    touches: Mutex<Vec<Touch>>,
    tally: Mutex<Tally>,
    breaches: Mutex<Vec<Breach>>,
}

/// A fault that acts; [`Judge::settled`] ends it.
#[derive(Debug)]
pub struct Acting(usize);

impl Judge {
    /// Nothing happened yet.
    pub fn new(start: Instant) -> Self {
        Self { start, touches: Mutex::default(), tally: Mutex::default(), breaches: Mutex::default() }
    }

    /// A fault is about to strike these nodes.
    pub fn strikes(&self, what: String, nodes: Vec<Node>) -> Acting {
        let mut touches = self.touches.lock();
        touches.push(Touch { what, nodes, from: Instant::now(), to: None });
        Acting(touches.len() - 1)
    }

    /// Its repair has settled.
    pub fn settled(&self, acting: &Acting) {
        self.touches.lock()[acting.0].to = Some(Instant::now());
    }

    /// Whether a fault other than `acting` touched `node` since then.
    pub fn touched_since(&self, since: Instant, node: Node, acting: &Acting) -> bool {
        let touches = self.touches.lock();
        let others = touches.iter().enumerate().filter(|(index, _)| *index != acting.0);
        others.map(|(_, t)| t).any(|t| t.nodes.contains(&node) && t.overlaps(since, Instant::now()))
    }

    /// Whether a router, a decode worker and, for `remote` ones, a prefill worker were touched by no fault throughout.
    fn live(&self, from: Instant, to: Instant, remote: bool) -> bool {
        let touches = self.touches.lock();
        let touched: BTreeSet<Node> =
            touches.iter().filter(|t| t.overlaps(from, to)).flat_map(|t| t.nodes.iter().copied()).collect();
        let any = |of: fn(&Node) -> bool| Node::ALL.iter().any(|node| of(node) && !touched.contains(node));
        any(|n| matches!(n, Node::Router(_)))
            && any(|n| matches!(n, Node::Decode(_)))
            && (!remote || any(|n| matches!(n, Node::Prefill(_))))
    }

    /// A request ended.
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

    /// A promise is broken; the faults between these times are its circumstances.
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

    /// What broke so far.
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
        let first = judge.strikes("d-0 killed".into(), vec![Node::Decode(0), Node::Prefill(0)]);
        ended(&judge, true, sent);
        assert_eq!((judge.tally().failed_live, judge.breaches().len()), (1, 1), "the other pair was alive");
        let second = judge.strikes("p-1 killed".into(), vec![Node::Prefill(1)]);
        ended(&judge, true, sent);
        ended(&judge, false, sent);
        assert_eq!((judge.tally().failed_live, judge.tally().failed_dark), (2, 1), "local prefill was alive");
        assert!(judge.touched_since(sent, Node::Prefill(1), &first));
        judge.settled(&first);
        judge.settled(&second);
        ended(&judge, true, sent);
        assert_eq!(judge.tally().failed_dark, 2, "both prefill workers were touched while it ran");
        std::thread::sleep(Duration::from_millis(2));
        ended(&judge, true, Instant::now());
        assert_eq!(judge.tally().failed_live, 3);
    }
}
