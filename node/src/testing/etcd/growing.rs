//! etcd nodes that start one after the other, as in a StatefulSet.

use super::{EtcdServer, LOOPBACK, quick};
use crate::membership::etcd::{EtcdConfig, JoinError, ListedNode, Start, join};
use std::future::Future;
use std::io;
use std::time::Duration;

/// Longest time for a node to join its cluster.
const JOIN_MAX: Duration = Duration::from_secs(60);

/// A list of nodes, of which the first few run.
pub struct Growing(Vec<EtcdServer>);

impl Growing {
    /// Chooses folders and ports of `nodes`; none runs.
    pub fn prepare(nodes: usize) -> io::Result<Self> {
        let prepare = |index| EtcdServer::prepare(format!("etcd-{index}"), LOOPBACK, Vec::new());
        (0..nodes).map(prepare).collect::<io::Result<_>>().map(Self)
    }

    fn listed(&self) -> Vec<ListedNode> {
        let node =
            |node: &EtcdServer| ListedNode { name: node.name.clone(), client: node.url(), peer: node.peer_url() };
        self.0.iter().map(node).collect()
    }

    /// Settings that reach the first nodes, with short waits.
    pub fn config(&self, nodes: usize) -> EtcdConfig {
        quick(self.urls()[..nodes].to_vec())
    }

    /// Addresses of clients, by node.
    pub fn urls(&self) -> Vec<String> {
        self.0.iter().map(EtcdServer::url).collect()
    }

    /// Address of a node's peers.
    pub fn peer(&self, node: usize) -> String {
        self.0[node].peer_url()
    }

    /// Starts a node with a flag that lists the first `of` nodes.
    pub fn run_with_flags(&mut self, node: usize, of: usize) -> io::Result<()> {
        self.spawn_with_flags(&[node], of)
    }

    /// The same for several nodes at once.
    pub fn spawn_with_flags(&mut self, which: &[usize], of: usize) -> io::Result<()> {
        let all = self.0[..of].iter().map(EtcdServer::as_node).collect::<Vec<_>>().join(",");
        for node in which {
            self.0[*node].nodes.clone_from(&all);
            self.0[*node].spawn()?;
        }
        which.iter().try_for_each(|node| self.0[*node].wait_serving())
    }

    /// How a node of a list of `of` nodes starts, once that is decided.
    pub fn start_of(&self, node: usize, of: usize) -> impl Future<Output = Result<Start, JoinError>> + Send + use<> {
        let (listed, server, config) = (self.listed()[..of].to_vec(), &self.0[node], self.config(of));
        let (data, listen) = (server.data(), ([127, 0, 0, 1], server.peer).into());
        async move { join(&listed, node, &data, listen, &config, JOIN_MAX, |_| ()).await }
    }

    /// Starts a node as one of `of`.
    pub async fn run_joined(&mut self, node: usize, of: usize) -> io::Result<()> {
        let start = self.start_of(node, of).await.map_err(io::Error::other)?;
        let own = self.listed()[node].clone();
        let server = &mut self.0[node];
        // The settings of the configuration file, as flags.
        let lines = start.lines(&own);
        let flag = |key: &str| lines.lines().find_map(|line| line.strip_prefix(&format!("{key}: "))).map(str::to_owned);
        server.nodes = flag("initial-cluster").unwrap_or_default();
        let flags = ["initial-cluster-state", "initial-cluster-token"];
        server.flags = flags.iter().filter_map(|key| Some(format!("--{key}={}", flag(key)?))).collect();
        server.spawn()?;
        server.wait_serving()
    }

    pub fn kill(&mut self, node: usize) {
        self.0[node].kill();
    }

    /// Removes a node's data; it must not run.
    pub fn wipe(&self, node: usize) -> io::Result<()> {
        self.0[node].wipe()
    }
}
