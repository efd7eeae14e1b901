//! What happens in a schedule.

use super::clock::Addr;
use super::handoff::Pouch;
use super::wire::Wire;
use baton_kv_transfer::pure::SumRun;
use baton_node::membership::Member;
use baton_node::membership::etcd::view::{Change, Position};
use baton_types::LoadReport;
use baton_types::{ErrorKind, InstanceRecord, Party, RequestId, TokenId};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A defect of the world, made on purpose.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// A process dies; `silent` if nobody is told by a reset.
    Crash { process: usize, silent: bool },
    /// It starts anew, at the same address.
    Restart { process: usize },
    /// It stops.
    Stall { process: usize },
    /// It goes on where it stopped.
    Resume { process: usize },
    /// Data-plane connections between two processes break.
    Cut { process: usize, other: usize },
    /// A router's watch breaks.
    BreakWatch { process: usize },
    /// etcd loses what it knew of late (or everything), and goes on in another history.
    Wipe { all: bool },
    /// etcd does not answer for so many milliseconds.
    EtcdAway { ms: u64 },
    /// The records of most instances go at once, although they are alive.
    LoseRecords,
    /// The next write of this process arrives damaged.
    Damage { process: usize },
    /// The device of this process fails under its next layer.
    DeviceFails { process: usize },
    /// The reader behind this request's answer takes nothing for a while.
    Pause { request: usize },
    /// No more faults: everybody runs again.
    Heal,
}

/// A worker's words on a stream to a router.
#[derive(Clone, Debug)]
pub(super) enum Said {
    Claimed,
    Started,
    Adopted,
    Token { token: TokenId, ends: bool },
    Done,
    Error(Trouble),
}

/// A typed error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) kind: ErrorKind,
    pub(super) retry_after: Option<Duration>,
}

impl Trouble {
    pub(super) const fn new(kind: ErrorKind) -> Self {
        Self { kind, retry_after: None }
    }
}

/// What a router's watch brings.
#[derive(Clone, Debug)]
pub(super) enum Watched {
    /// All records; `stands` counts the histories of etcd, `failures` the times that connects to it failed.
    Listed { position: Position, members: Vec<Member>, stands: u64, failures: u64 },
    /// Some changes, the last of them at `revision`.
    Changed { revision: i64, changes: Vec<Change> },
}

/// One thing that happens, to the world or to a process.
#[derive(Debug)]
pub(super) enum Event {
    Fault(Fault),
    // etcd
    LeasesEnd,
    Renew(Addr),
    Beat {
        record: Arc<InstanceRecord>,
    },
    LookForEnds,
    // A router
    Arrive(usize),
    Turn,
    ClientGone(usize),
    Deadline(usize),
    Again {
        request: usize,
    },
    ClaimLate {
        request: usize,
        attempt: u32,
    },
    DoubtEnds {
        request: usize,
        attempt: u32,
    },
    Said {
        call: usize,
        said: Said,
    },
    Broken {
        call: usize,
    },
    NoSign {
        call: usize,
        stops: u64,
    },
    Report {
        party: Party,
        report: Box<LoadReport>,
    },
    Watched {
        watch: u64,
        what: Watched,
    },
    WatchAgain,
    AskDoubted,
    Answered {
        party: Party,
        alive: bool,
    },
    Probe {
        router: Addr,
        party: Party,
    },
    // A worker
    Open {
        call: usize,
    },
    HangUp {
        call: usize,
    },
    /// The transfer is to give up what comes for a stream that is gone.
    CancelIncoming {
        request: RequestId,
    },
    CallDeadline {
        call: usize,
    },
    Engine,
    StepEnd,
    LayerReady {
        key: u64,
        layer: u32,
        end: u32,
        ok: bool,
    },
    Finish {
        key: u64,
    },
    Wire {
        conn: usize,
        wire: Wire,
    },
    Put {
        put: u64,
    },
    Flushed {
        key: u64,
        epoch: u32,
    },
    /// `hold` goes with the event: until then the blocks are read.
    Sum {
        key: u64,
        epoch: u32,
        layer: usize,
        tokens: Range<u32>,
        hold: Option<Pouch>,
    },
    Check {
        key: u64,
        runs: Arc<Vec<SumRun>>,
    },
    Granted {
        key: u64,
    },
    ConnectionLost {
        conn: usize,
    },
    Silent {
        conn: usize,
        process: usize,
        stops: u64,
    },
    PeerDead {
        peer: Addr,
    },
    Tick,
    SendReports,
    ReportTo {
        router: Addr,
    },
    SendRenewal,
}
