//! How an etcd node from a list of nodes, as in a StatefulSet, joins its cluster. The decision is made at each start.
//!
//! A flag with all nodes is safe only once: nodes that are added later with a longer list would form a second cluster.
//! So a node with data resumes with it, and a node without data asks the others. If a cluster answers, the node is
//! added to it and joins it. Only the first node may create a cluster, alone, and only once a majority has reported
//! that it has no data either. A cluster that is only unreachable cannot have a quorum without one of these nodes.
//!
//! [`step`] makes the decision, without I/O.

use super::EtcdConfig;
use super::connection::{Node, connect_any, within};
use super::error::EtcdError;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

/// Sent at its peer address by a node without data while it waits.
const NO_DATA: &[u8] = b"baton: this node of etcd has no data yet\n";
/// Interval between questions to the other nodes.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for a node's answer about its data.
const SAY_MAX: Duration = Duration::from_secs(1);
/// A waiting node serves this many connections at once; there are not more nodes.
const SAYING_MAX: usize = 16;

/// A node of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedNode {
    /// Its name, unique in the list.
    pub name: String,
    /// Its address for clients, `http://host:port`.
    pub client: String,
    /// Its address for peers.
    pub peer: String,
}

/// How a node starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// With its existing data.
    Resume,
    /// As the first node of a new cluster, which this token distinguishes from all others.
    Begin {
        /// Drawn anew: another cluster of the same nodes must have another id.
        token: String,
    },
    /// As a new member of the existing cluster.
    Join {
        /// All its nodes, `name=peer address`, separated by commas.
        nodes: String,
    },
}

impl Start {
    /// The lines of etcd's configuration file for this start.
    pub fn lines(&self, own: &ListedNode) -> String {
        let (state, nodes) = match self {
            // etcd ignores these settings if it has data.
            Self::Resume => ("existing", format!("{}={}", own.name, own.peer)),
            Self::Begin { .. } => ("new", format!("{}={}", own.name, own.peer)),
            Self::Join { nodes } => ("existing", nodes.clone()),
        };
        let token =
            if let Self::Begin { token } = self { format!("initial-cluster-token: {token}\n") } else { String::new() };
        let ListedNode { name, client, peer } = own;
        format!(
            "name: {name}\nadvertise-client-urls: {client}\ninitial-advertise-peer-urls: {peer}\ninitial-cluster: {nodes}\n\
             initial-cluster-state: {state}\n{token}"
        )
    }
}

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Nothing changed within the longest allowed wait.
    #[error("waits in vain: {0}")]
    Waits(String),
    /// It cannot report to the others that it has no data.
    #[error("cannot listen at {address}, the address of peers")]
    Listen { address: SocketAddr, source: io::Error },
}

/// A member of a cluster, as one of its nodes lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    id: u64,
    /// Empty until it has started.
    name: String,
    peers: Vec<String>,
}

/// The answer of another node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NodeAnswer {
    Cluster { id: u64, members: Vec<Member> },
    NoData,
    Nothing,
}

/// What the node does next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Begin,
    Join {
        nodes: String,
    },
    /// Ask this node to add it.
    Add {
        through: usize,
    },
    /// Ask this node to remove the member that this node was before it lost its data.
    Remove {
        member: u64,
        through: usize,
    },
    Wait(String),
}

/// The step of a node without data. `said` holds the answers of the others, by their position in the list.
fn step(nodes: &[ListedNode], own: usize, said: &BTreeMap<usize, NodeAnswer>) -> Step {
    let peer = &nodes[own].peer;
    let mut clusters: BTreeMap<u64, (usize, &[Member])> = BTreeMap::new();
    for (at, said) in said {
        if let NodeAnswer::Cluster { id, members } = said {
            clusters.entry(*id).or_insert((*at, members));
        }
    }
    let Some((_, &(through, members))) = clusters.first_key_value() else {
        return first(nodes, own, said);
    };
    if clusters.len() > 1 {
        let told: Vec<_> =
            clusters.iter().map(|(id, (at, _))| format!("{} is of cluster {id:x}", nodes[*at].name)).collect();
        return Step::Wait(format!(
            "the nodes are of several clusters, and one of them has to go: {}",
            told.join(", ")
        ));
    }
    let is_own = |member: &&Member| member.peers.contains(peer);
    match members.iter().find(is_own) {
        Some(listed) if listed.name.is_empty() => {
            let named = |member: &Member| {
                let name = if is_own(&member) { &nodes[own].name } else { &member.name };
                member.peers.iter().map(|peer| format!("{name}={peer}")).collect::<Vec<_>>()
            };
            Step::Join { nodes: members.iter().flat_map(named).collect::<Vec<_>>().join(",") }
        }
        // The data is lost for good, and a member of raft must not forget its log.
        Some(lost) => Step::Remove { member: lost.id, through },
        None => match members.iter().find(|member| member.name.is_empty()) {
            Some(other) => Step::Wait(format!("a node at {} was added and has not started yet", other.peers.join(","))),
            None => Step::Add { through },
        },
    }
}

/// The step if no cluster answers.
fn first(nodes: &[ListedNode], own: usize, said: &BTreeMap<usize, NodeAnswer>) -> Step {
    if own != 0 {
        return Step::Wait(format!("{} does not answer, and it alone may begin a cluster", nodes[0].name));
    }
    let empty = 1 + said.values().filter(|said| **said == NodeAnswer::NoData).count();
    if 2 * empty > nodes.len() {
        return Step::Begin;
    }
    Step::Wait(format!(
        "{empty} of {} nodes are known to have no data: the others may be a cluster that is away",
        nodes.len()
    ))
}

/// Decides how the node at position `own` of `nodes` starts. Its data folder is `data`; it waits for at most `max`.
/// Meanwhile it reports at `listen`, the later peer address of etcd, that it has no data, and passes the reason of its
/// wait to `tell`. `etcd` says how to connect to nodes; its endpoints are ignored.
pub async fn join(
    nodes: &[ListedNode],
    own: usize,
    data: &Path,
    listen: SocketAddr,
    etcd: &EtcdConfig,
    max: Duration,
    tell: impl Fn(&str),
) -> Result<Start, JoinError> {
    if has_data(data) {
        return Ok(Start::Resume);
    }
    let deadline = Instant::now() + max;
    let listener = TcpListener::bind(listen).await.map_err(|source| JoinError::Listen { address: listen, source })?;
    let says = Saying(tokio::spawn(say_no_data(listener)));
    let etcd = EtcdConfig { endpoints: nodes.iter().map(|node| node.client.clone()).collect(), ..etcd.clone() };
    let mut last = String::new();
    loop {
        let others = nodes.iter().enumerate().filter(|(at, _)| *at != own);
        let answers = others.map(|(at, node)| {
            let etcd = &etcd;
            async move { (at, ask(etcd, at, node).await) }
        });
        let said = join_all(answers).await.into_iter().collect();
        let why = match step(nodes, own, &said) {
            Step::Begin => {
                says.end().await;
                return Ok(Start::Begin { token: format!("{:016x}", rand::random::<u64>()) });
            }
            Step::Join { nodes } => {
                says.end().await;
                return Ok(Start::Join { nodes });
            }
            Step::Add { through } => describe("asks to be added", add(&etcd, through, &nodes[own].peer).await),
            Step::Remove { member, through } => {
                describe("removes what it was before its data were lost", remove(&etcd, through, member).await)
            }
            Step::Wait(why) => why,
        };
        if why != last {
            tell(&why);
            last.clone_from(&why);
        }
        if Instant::now() >= deadline {
            return Err(JoinError::Waits(why));
        }
        sleep(ASK_EVERY).await;
    }
}

/// Whether etcd would resume with the data in the folder; it makes the same check.
fn has_data(data: &Path) -> bool {
    let Ok(files) = std::fs::read_dir(data.join("member/wal")) else { return false };
    files.flatten().any(|file| file.path().extension().is_some_and(|extension| extension == "wal"))
}

fn describe(what: &str, result: Result<(), EtcdError>) -> String {
    match result {
        Ok(()) => what.to_owned(),
        Err(error) => format!("{what}, which is refused: {error}"),
    }
}

async fn ask(etcd: &EtcdConfig, at: usize, node: &ListedNode) -> NodeAnswer {
    if let Ok((id, members)) = list(etcd, at).await {
        return NodeAnswer::Cluster { id, members };
    }
    match timeout(SAY_MAX, hear(&node.peer)).await {
        Ok(Ok(true)) => NodeAnswer::NoData,
        _ => NodeAnswer::Nothing,
    }
}

/// The members in the node's own view: a cluster without a quorum also counts.
async fn list(etcd: &EtcdConfig, at: usize) -> Result<(u64, Vec<Member>), EtcdError> {
    let max = etcd.request_max();
    let mut client = connect_any(etcd, Node::at(at), max).await?;
    let answer = within(max, "list the members", client.member_list()).await?;
    let member = |m: &etcd_client::Member| Member { id: m.id(), name: m.name().into(), peers: m.peer_urls().to_vec() };
    Ok((answer.header().map_or(0, |header| header.cluster_id()), answer.members().iter().map(member).collect()))
}

async fn add(etcd: &EtcdConfig, at: usize, peer: &str) -> Result<(), EtcdError> {
    let max = etcd.request_max();
    let mut client = connect_any(etcd, Node::at(at), max).await?;
    within(max, "add a member", client.member_add([peer], None)).await.map(drop)
}

async fn remove(etcd: &EtcdConfig, at: usize, member: u64) -> Result<(), EtcdError> {
    let max = etcd.request_max();
    let mut client = connect_any(etcd, Node::at(at), max).await?;
    within(max, "remove a member", client.member_remove(member)).await.map(drop)
}

/// Whether a waiting node reports there that it has no data. etcd itself sends nothing before it receives a request.
async fn hear(peer: &str) -> io::Result<bool> {
    let host = peer.split_once("://").map_or(peer, |(_, host)| host);
    let mut said = Vec::new();
    TcpStream::connect(host).await?.take(NO_DATA.len() as u64).read_to_end(&mut said).await?;
    Ok(said == NO_DATA)
}

async fn say_no_data(listener: TcpListener) {
    let mut saying = tokio::task::JoinSet::new();
    loop {
        let Ok((mut stream, _)) = listener.accept().await else { continue };
        while saying.try_join_next().is_some() {}
        if saying.len() < SAYING_MAX {
            saying.spawn(async move { timeout(SAY_MAX, stream.write_all(NO_DATA)).await });
        }
    }
}

/// The task that reports it; it ends with its owner.
struct Saying(tokio::task::JoinHandle<()>);

impl Saying {
    /// Ends it; then the address is free.
    async fn end(mut self) {
        self.0.abort();
        let _ = (&mut self.0).await;
    }
}

impl Drop for Saying {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize) -> Vec<ListedNode> {
        let node = |i| ListedNode {
            name: format!("e-{i}"),
            client: format!("http://e-{i}:2379"),
            peer: format!("http://e-{i}:2380"),
        };
        (0..count).map(node).collect()
    }

    /// A cluster of nodes of the list; nodes after a `+` were added and have not started.
    fn cluster(id: u64, of: &str) -> NodeAnswer {
        let member = |word: &str| {
            let at = word.trim_start_matches('+');
            let name = if word.starts_with('+') { String::new() } else { format!("e-{at}") };
            Member { id: 100 + at.parse::<u64>().unwrap(), name, peers: vec![format!("http://e-{at}:2380")] }
        };
        NodeAnswer::Cluster { id, members: of.split(' ').map(member).collect() }
    }

    #[test]
    fn a_node_without_data_begins_joins_or_waits() {
        let of = |own: usize, count: usize, said: &[(usize, NodeAnswer)]| match step(
            &nodes(count),
            own,
            &said.iter().cloned().collect(),
        ) {
            Step::Begin => "begin".to_owned(),
            Step::Join { nodes } => format!("join {nodes}"),
            Step::Add { through } => format!("add through {through}"),
            Step::Remove { member, through } => format!("remove {member} through {through}"),
            Step::Wait(why) => format!("wait: {why}"),
        };
        let (silent, empty) = (NodeAnswer::Nothing, NodeAnswer::NoData);
        // The first installation, of one and of three.
        assert_eq!(of(0, 1, &[]), "begin");
        assert_eq!(of(0, 3, &[(1, empty.clone()), (2, silent.clone())]), "begin");
        assert!(of(1, 3, &[(0, empty.clone()), (2, empty.clone())]).starts_with("wait: e-0 does not answer"));
        assert!(of(2, 3, &[(0, silent.clone()), (1, empty.clone())]).starts_with("wait: e-0 does not answer"));
        // The first node lost its data, and the others do not answer: they may form a cluster.
        assert!(of(0, 3, &[(1, silent.clone()), (2, silent.clone())]).starts_with("wait: 1 of 3 nodes"));
        // Growth, one node at a time.
        assert_eq!(of(1, 3, &[(0, cluster(7, "0")), (2, empty.clone())]), "add through 0");
        assert_eq!(
            of(1, 3, &[(0, cluster(7, "0 +1")), (2, empty.clone())]),
            "join e-0=http://e-0:2380,e-1=http://e-1:2380"
        );
        assert!(
            of(2, 3, &[(0, cluster(7, "0 +1")), (1, empty.clone())])
                .contains("http://e-1:2380 was added and has not started")
        );
        assert_eq!(of(2, 3, &[(0, silent.clone()), (1, cluster(7, "0 1"))]), "add through 1");
        // A node that lost its data is a new member from then on, also if it is the first node.
        assert_eq!(of(0, 3, &[(1, cluster(7, "0 1 2")), (2, cluster(7, "0 1 2"))]), "remove 100 through 1");
        assert_eq!(of(0, 3, &[(1, cluster(7, "1 2")), (2, cluster(7, "1 2"))]), "add through 1");
        // A node joins neither of two clusters.
        let split = of(2, 3, &[(0, cluster(7, "0")), (1, cluster(8, "1"))]);
        assert!(split.contains("several clusters") && split.contains("e-1 is of cluster 8"), "{split}");
    }

    #[test]
    fn what_etcd_reads_says_how_it_starts() {
        let own = &nodes(1)[0];
        let begin = Start::Begin { token: "t".into() }.lines(own);
        assert!(begin.contains("initial-cluster-state: new\ninitial-cluster-token: t\n"), "{begin}");
        let join = Start::Join { nodes: "a=http://a,b=http://b".into() }.lines(own);
        assert!(join.contains("initial-cluster: a=http://a,b=http://b\ninitial-cluster-state: existing\n"), "{join}");
        assert!(!Start::Resume.lines(own).contains("state: new"));
    }
}
