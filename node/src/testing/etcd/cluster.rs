//! Several etcd nodes of one cluster.

use super::{EtcdServer, LOOPBACK, make_space, quick};
use crate::membership::etcd::EtcdConfig;
use etcd_client::Client;
use std::io;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Longest wait for a leader.
const LEADER_MAX: Duration = Duration::from_secs(30);
/// Longest wait for a node's status.
const STATUS_MAX: Duration = Duration::from_secs(2);

/// Nodes, each of which may be stopped separately.
pub struct EtcdCluster(Vec<EtcdServer>);

impl EtcdCluster {
    /// Starts `nodes` nodes and waits until all serve.
    pub fn start(nodes: usize) -> io::Result<Self> {
        Self::start_on(LOOPBACK, nodes, &[])
    }

    /// The same on another IP address of this host, with further flags.
    pub fn start_on(host: &str, nodes: usize, flags: &[&str]) -> io::Result<Self> {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let prepare = |index| EtcdServer::prepare(format!("node-{index}"), host, flags.clone());
        let mut cluster = Self((0..nodes).map(prepare).collect::<io::Result<_>>()?);
        let all = cluster.0.iter().map(EtcdServer::as_node).collect::<Vec<_>>().join(",");
        cluster.0.iter_mut().for_each(|node| node.nodes.clone_from(&all));
        cluster.run_all()?;
        Ok(cluster)
    }

    /// Settings that reach all nodes, with short waits.
    pub fn config(&self) -> EtcdConfig {
        quick(self.0.iter().map(EtcdServer::url).collect())
    }

    /// Addresses of clients, `host:port`, by node.
    pub fn addresses(&self) -> Vec<String> {
        self.0.iter().map(EtcdServer::address).collect()
    }

    pub fn node(&mut self, index: usize) -> &mut EtcdServer {
        &mut self.0[index]
    }

    /// Starts all nodes that do not run, concurrently, since none serves without a majority.
    pub fn run_all(&mut self) -> io::Result<()> {
        for node in self.0.iter_mut().filter(|node| node.process.is_none()) {
            node.spawn()?;
        }
        self.0.iter_mut().try_for_each(EtcdServer::wait_serving)
    }

    /// Frees space on all nodes, which must run, as an operator does after the alarm.
    pub async fn make_space(&self) -> Result<(), etcd_client::Error> {
        make_space(&self.0.iter().collect::<Vec<_>>()).await
    }

    pub fn kill_all(&mut self) {
        self.0.iter_mut().for_each(EtcdServer::kill);
    }

    /// Removes the data of all nodes; none must run.
    pub fn wipe_all(&self) -> io::Result<()> {
        self.0.iter().try_for_each(EtcdServer::wipe)
    }

    /// The leading node; waits until a node reports that it leads.
    pub async fn leader(&self) -> io::Result<usize> {
        let deadline = Instant::now() + LEADER_MAX;
        while Instant::now() < deadline {
            for (index, node) in self.0.iter().enumerate().filter(|(_, node)| node.process.is_some()) {
                if matches!(timeout(STATUS_MAX, leads(node)).await, Ok(Ok(true))) {
                    return Ok(index);
                }
            }
            sleep(Duration::from_millis(50)).await;
        }
        Err(io::Error::other(format!("no node of etcd leads after {LEADER_MAX:?}")))
    }
}

async fn leads(node: &EtcdServer) -> Result<bool, etcd_client::Error> {
    let mut client = Client::connect([node.url()], None).await?;
    let status = client.status().await?;
    Ok(status.header().is_some_and(|header| header.member_id() == status.leader()))
}
