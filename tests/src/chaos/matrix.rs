//! The only table of faults: which component fails and how, in which phase of requests, what a client sees of it, and what is freed when.
//! `docs/reliability.md` shows its rendering; a run counts how often it hit each cell.

use std::fmt;

/// The component that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// A router process.
    Router,
    /// A prefill worker process.
    Prefill,
    /// A decode worker process.
    Decode,
    /// One of etcd's three nodes.
    Etcd,
    /// The KV network, at one prefill and one decode worker.
    Data,
    /// The network between routers and workers, at one prefill and one decode worker.
    Control,
    /// The network between workers and etcd, at one prefill and one decode worker.
    Registry,
    /// The network between one router and etcd.
    RouterRegistry,
}

impl Component {
    /// Whether it can fail only in a network that the run itself has set up.
    pub const fn is_link(self) -> bool {
        matches!(self, Self::Data | Self::Control | Self::Registry | Self::RouterRegistry)
    }
}

impl Fault {
    /// Whether nothing else may fail meanwhile: otherwise every failure would be excused.
    pub const fn is_alone(self) -> bool {
        matches!(self, Self::Full)
    }
}

/// The kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// SIGKILL, then a restart at the same address.
    Killed,
    /// SIGSTOP, then SIGCONT.
    Stopped,
    /// SIGTERM, then a restart at the same address.
    Drained,
    /// The link is down, then up again.
    Cut,
    /// The link carries a few Mbit/s.
    Narrowed,
    /// Every packet is delayed.
    Delayed,
    /// Some packets are lost.
    Lossy,
    /// All packets of one direction are lost, either to the part or from it, chosen at random. The other direction works.
    OneWay,
    /// One byte of some packets is changed, and their checksums are corrected.
    Damaged,
    /// Its disk quota is used up: it answers reads and refuses writes.
    Full,
}

/// The phase of a request at the failing component at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Queued, or claimed: nothing is computed. At a router: no token has been received.
    Waiting,
    /// Its prompt is computed there.
    Prefill,
    /// Its handoff is open. At a router: only the first token has been received.
    Transfer,
    /// Its answer is generated there.
    Decode,
}

/// What happens when this fault meets a request in these phases.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The component that fails.
    pub component: Component,
    /// How it fails.
    pub fault: Fault,
    /// The phases of the requests.
    pub phases: &'static [Phase],
    /// What their clients see.
    pub client: &'static str,
    /// What is freed, and when.
    pub freed: &'static str,
    /// Tests that show it in at least one of these phases, besides the chaos run itself: files relative to the root of the repository.
    pub tests: &'static [&'static str],
}

/// A combination to hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell(pub Component, pub Fault, pub Phase);

/// All cells of the table.
pub fn cells() -> impl Iterator<Item = Cell> {
    MATRIX.iter().flat_map(|row| row.phases.iter().map(|phase| Cell(row.component, row.fault, *phase)))
}

/// The cells that can be hit: links fail only if the run has its own.
pub fn possible(links: bool) -> impl Iterator<Item = Cell> {
    cells().filter(move |cell| links || !cell.0.is_link())
}

use Component::{Control, Data, Decode as Decoder, Etcd, Prefill as Prefiller, Registry, Router, RouterRegistry};
use Fault::{Cut, Damaged, Delayed, Drained, Full, Killed, Lossy, Narrowed, OneWay, Stopped};
use Phase::{Decode, Prefill, Transfer, Waiting};

const ALL: &[Phase] = &[Waiting, Prefill, Transfer, Decode];
const AT_ROUTER: &[Phase] = &[Waiting, Transfer, Decode];

const SAME: &str = "nothing: another worker computes the prompt, with the same tokens";
const PAUSE: &str = "a pause; the answer continues on another worker with the same tokens";
const SLOWER: &str = "the same tokens, later";
const NOTHING: &str = "nothing";
const NONE: &str = "nothing to free";

const DRAIN: &str = "tests/tests/faults/drain.rs";
const RECOVERY: &str = "tests/tests/faults/recovery.rs";
const ETCD: &str = "tests/tests/etcd.rs";
/// etcd nodes that die and hang, without load.
const NODES: &str = "node/src/membership/etcd/tests/nodes.rs";
/// An etcd without disk space, without load.
const SPACE: &str = "node/src/membership/etcd/tests/space.rs";

/// The table.
pub const MATRIX: &[Row] = &[
    Row {
        component: Router,
        fault: Killed,
        phases: AT_ROUTER,
        client: "the stream closes without a last message; sent again to another router, the same seed gives the same answer",
        freed: "workers: everything of the request, as soon as the connection closes",
        tests: &[],
    },
    Row {
        component: Router,
        fault: Stopped,
        phases: AT_ROUTER,
        client: "a pause; if it is longer than the client's own probes, as with a killed router",
        freed: "workers: everything of the request, once the router's connection misses its pings (6 s)",
        tests: &[],
    },
    Row {
        component: Router,
        fault: Drained,
        phases: AT_ROUTER,
        client: "nothing: running requests end within the drain's limit; new ones are refused, and sent to another router",
        freed: "as each request ends",
        tests: &[DRAIN],
    },
    Row {
        component: Prefiller,
        fault: Killed,
        phases: &[Waiting, Prefill],
        client: SAME,
        freed: "decode worker: the claim, or the reservation behind the fence of the closed connection, within 1 s",
        tests: &[],
    },
    Row {
        component: Prefiller,
        fault: Killed,
        phases: &[Transfer],
        client: PAUSE,
        freed: "decode worker: the reservation, behind the fence of the closed connection, within 1 s",
        tests: &[RECOVERY],
    },
    Row {
        component: Prefiller,
        fault: Stopped,
        phases: &[Waiting, Prefill],
        client: "a pause; if it is longer than the pings allow (6 s), another worker computes the prompt",
        freed: "decode worker: the reservation, once the abort is not acknowledged and the connection is closed (2 s)",
        tests: &[],
    },
    Row {
        component: Prefiller,
        fault: Stopped,
        phases: &[Transfer],
        client: PAUSE,
        freed: "decode worker: the reservation, once the abort is not acknowledged and the connection is closed (2 s); late writes of the resumed worker are dropped",
        tests: &[RECOVERY],
    },
    Row {
        component: Prefiller,
        fault: Drained,
        phases: &[Waiting, Prefill, Transfer],
        client: "nothing; work that exceeds the drain's limit moves to another worker",
        freed: "as each handoff is acknowledged, or cut off at the limit",
        tests: &[DRAIN, RECOVERY],
    },
    Row {
        component: Decoder,
        fault: Killed,
        phases: &[Waiting, Prefill],
        client: SAME,
        freed: "prefill worker: its blocks, when the connection closes",
        tests: &[],
    },
    Row {
        component: Decoder,
        fault: Killed,
        phases: &[Transfer],
        client: PAUSE,
        freed: "prefill worker: its blocks, when the connection closes",
        tests: &[],
    },
    Row {
        component: Decoder,
        fault: Killed,
        phases: &[Decode],
        client: PAUSE,
        freed: "prefill worker: its blocks, when the connection closes",
        tests: &[RECOVERY],
    },
    Row {
        component: Decoder,
        fault: Stopped,
        phases: &[Waiting, Prefill, Transfer],
        client: "a pause; if it is longer than the pings allow (6 s), the answer continues on another worker with the same tokens",
        freed: "prefill worker: its blocks, at the abort, or with the connection 1.5 s later; decode worker: its own when it resumes, since its streams are closed",
        tests: &[],
    },
    Row {
        component: Decoder,
        fault: Stopped,
        phases: &[Decode],
        client: "a pause; if it is longer than the pings allow (6 s), the answer continues on another worker with the same tokens",
        freed: "prefill worker: its blocks, at the abort; decode worker: its own when it resumes, since its streams are closed",
        tests: &[RECOVERY],
    },
    Row {
        component: Decoder,
        fault: Drained,
        phases: ALL,
        client: "nothing; answers that exceed the drain's limit continue on another worker with the same tokens",
        freed: "as each request ends, or is cut off at the limit",
        tests: &[DRAIN, RECOVERY],
    },
    Row {
        component: Data,
        fault: Cut,
        phases: &[Prefill, Transfer],
        client: "a pause after the first token; after the peers' timeout, another pair or local prefill, with the same tokens",
        freed: "decode worker: the reservation, behind the fence of the closed connection; prefill worker: its blocks, with the handoff",
        tests: &[],
    },
    Row { component: Data, fault: Cut, phases: &[Decode], client: NOTHING, freed: NONE, tests: &[] },
    Row {
        component: Data,
        fault: OneWay,
        phases: &[Prefill, Transfer],
        client: "a pause after the first token; after the peers' timeout, another pair or local prefill, with the same tokens",
        freed: "decode worker: the reservation, behind the fence of the closed connection; prefill worker: its blocks, with the handoff",
        tests: &[],
    },
    Row { component: Data, fault: OneWay, phases: &[Decode], client: NOTHING, freed: NONE, tests: &[] },
    Row {
        component: Data,
        fault: Damaged,
        phases: &[Prefill, Transfer],
        client: "a pause after the first token; then another pair or local prefill, with the same tokens",
        freed: "decode worker: the reservation, behind the fence of the connection, which ends with the first damaged byte; prefill worker: its blocks, with the handoff",
        tests: &[],
    },
    Row { component: Data, fault: Damaged, phases: &[Decode], client: NOTHING, freed: NONE, tests: &[] },
    Row { component: Data, fault: Narrowed, phases: &[Prefill, Transfer], client: SLOWER, freed: NONE, tests: &[] },
    Row { component: Data, fault: Narrowed, phases: &[Decode], client: NOTHING, freed: NONE, tests: &[] },
    Row { component: Data, fault: Delayed, phases: &[Prefill, Transfer], client: SLOWER, freed: NONE, tests: &[] },
    Row { component: Data, fault: Delayed, phases: &[Decode], client: NOTHING, freed: NONE, tests: &[] },
    Row { component: Data, fault: Lossy, phases: &[Prefill, Transfer], client: SLOWER, freed: NONE, tests: &[] },
    Row { component: Data, fault: Lossy, phases: &[Decode], client: NOTHING, freed: NONE, tests: &[] },
    Row {
        component: Control,
        fault: Cut,
        phases: ALL,
        client: "a pause; if it is longer than the pings allow (6 s), the answer continues on another worker with the same tokens",
        freed: "on the isolated workers: when their side of the connection misses its pings (6 s)",
        tests: &[],
    },
    Row {
        component: Control,
        fault: OneWay,
        phases: ALL,
        client: "a pause; if it is longer than the pings allow (6 s), the answer continues on another worker with the same tokens",
        freed: "on the isolated worker: when its side of the connection misses its pings (6 s)",
        tests: &[],
    },
    Row { component: Control, fault: Narrowed, phases: ALL, client: SLOWER, freed: NONE, tests: &[] },
    Row { component: Control, fault: Delayed, phases: ALL, client: SLOWER, freed: NONE, tests: &[] },
    Row { component: Control, fault: Lossy, phases: ALL, client: SLOWER, freed: NONE, tests: &[] },
    Row {
        component: Registry,
        fault: Cut,
        phases: ALL,
        client: "nothing: running requests continue; a worker whose lease ends gets no new work until it is back",
        freed: NONE,
        tests: &[ETCD],
    },
    Row {
        component: Registry,
        fault: OneWay,
        phases: ALL,
        client: "nothing: running requests continue; a worker whose lease ends gets no new work until it is back",
        freed: NONE,
        tests: &[],
    },
    Row { component: Registry, fault: Narrowed, phases: ALL, client: NOTHING, freed: NONE, tests: &[] },
    Row { component: Registry, fault: Delayed, phases: ALL, client: NOTHING, freed: NONE, tests: &[] },
    Row { component: Registry, fault: Lossy, phases: ALL, client: NOTHING, freed: NONE, tests: &[] },
    Row {
        component: RouterRegistry,
        fault: Cut,
        phases: AT_ROUTER,
        client: "nothing: the router serves from its last view; a worker that joins gets no work from it until the link is back",
        freed: NONE,
        tests: &[ETCD],
    },
    Row { component: Etcd, fault: Killed, phases: AT_ROUTER, client: NOTHING, freed: NONE, tests: &[ETCD, NODES] },
    Row {
        component: Etcd,
        fault: Stopped,
        phases: AT_ROUTER,
        client: "nothing: sessions move to the next node",
        freed: NONE,
        tests: &[NODES],
    },
    Row {
        component: Etcd,
        fault: Full,
        phases: AT_ROUTER,
        client: "nothing: leases are renewed; processes that start register once there is space",
        freed: NONE,
        tests: &[SPACE],
    },
];

/// The table as shown in the documentation.
pub fn rendered() -> String {
    let mut text = String::from("| Part | Fault | Phase | Client sees | Freed, and when | Shown by |\n");
    text += "|---|---|---|---|---|---|\n";
    for row in MATRIX {
        let phases: Vec<String> = row.phases.iter().map(ToString::to_string).collect();
        let tests = row.tests.iter().map(|test| format!(", [{}](../{test})", name(test))).collect::<String>();
        let Row { component, fault, client, freed, .. } = row;
        text += &format!("| {component} | {fault} | {} | {client} | {freed} | chaos{tests} |\n", phases.join(", "));
    }
    text
}

/// A file name without folders and extension.
fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path).trim_end_matches(".rs")
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Router => "router",
            Prefiller => "prefill worker",
            Decoder => "decode worker",
            Etcd => "etcd node",
            Data => "link prefill-decode",
            Control => "link router-worker",
            Registry => "link worker-etcd",
            RouterRegistry => "link router-etcd",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Killed => "killed",
            Stopped => "stopped",
            Drained => "drained",
            Cut => "cut",
            Narrowed => "narrowed",
            Delayed => "delayed",
            Lossy => "lossy",
            OneWay => "cut one way",
            Damaged => "damaged",
            Full => "full",
        })
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Waiting => "waiting",
            Prefill => "prefill",
            Transfer => "transfer",
            Decode => "decode",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn what_shows_a_row_is_there() {
        let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let missing: Vec<_> =
            MATRIX.iter().flat_map(|row| row.tests).filter(|test| !root.join(test).is_file()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn every_part_fails_in_every_way_that_it_can() {
        let all: Vec<Cell> = cells().collect();
        let kinds: BTreeSet<_> = all.iter().map(|Cell(component, fault, _)| (*component, *fault)).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "a cell stands twice");
        for component in [Router, Prefiller, Decoder] {
            assert!([Killed, Stopped, Drained].into_iter().all(|fault| kinds.contains(&(component, fault))));
        }
        for link in [Data, Control, Registry] {
            assert!([Cut, Narrowed, Delayed, Lossy, OneWay].into_iter().all(|fault| kinds.contains(&(link, fault))));
        }
        let single = [(Etcd, Killed), (Etcd, Stopped), (Etcd, Full), (RouterRegistry, Cut), (Data, Damaged)];
        assert!(single.iter().all(|kind| kinds.contains(kind)) && kinds.len() == 29);
    }
}
