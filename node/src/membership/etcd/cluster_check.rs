//! Whether the configured etcd nodes are one cluster, and which alarms they raise.
//!
//! If the endpoints belong to two clusters, routers and workers would see two consistent but different states. So every
//! session first asks all nodes, and again at an interval. It uses the cluster to which most of the answering nodes
//! belong, and none in a tie. Every process that reaches the same nodes makes the same choice.

use super::EtcdConfig;
use super::connection::{Node, connect_any, within};
use super::error::EtcdError;
use etcd_client::Client;
use futures::future::join_all;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Longest wait for one node: the session begins after it, and a node that hangs is left out.
const ANSWER_MAX: Duration = Duration::from_millis(500);
/// Interval between checks during a session.
const ASK_EVERY: Duration = Duration::from_secs(15);
/// Most complaints that are stored.
const COMPLAINTS_MAX: usize = 16;

/// The state that the answering nodes report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Clusters by id, each with the addresses of its nodes.
    clusters: BTreeMap<u64, BTreeSet<String>>,
    /// Their alarms and errors, such as lack of space.
    complaints: BTreeSet<String>,
}

impl Nodes {
    fn add(&mut self, endpoint: &str, cluster: u64, complaints: &[String]) {
        self.clusters.entry(cluster).or_default().insert(endpoint.to_owned());
        let room = COMPLAINTS_MAX.saturating_sub(self.complaints.len());
        self.complaints.extend(complaints.iter().map(|complaint| complaint.chars().take(256).collect()).take(room));
    }

    /// Number of clusters; 0 if no node answered.
    pub fn clusters(&self) -> usize {
        self.clusters.len()
    }

    /// Alarms and errors that they report.
    pub fn complaints(&self) -> impl Iterator<Item = &str> {
        self.complaints.iter().map(String::as_str)
    }

    /// A message that the nodes form several clusters, and what to do; `None` if they do not.
    pub fn division(&self) -> Option<String> {
        let told = |(id, nodes): (&u64, &BTreeSet<String>)| {
            let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
            format!("{id:x} at {}", nodes.join(", "))
        };
        let of: Vec<String> = self.clusters.iter().map(told).collect();
        let do_what =
            "take the nodes of all but one out of membership.etcd.endpoints, or replace them without their data";
        (of.len() > 1).then(|| format!("the nodes of etcd are {} clusters: {}; {do_what}", of.len(), of.join(" and ")))
    }

    /// The cluster to use; none if no node answered, or in a tie.
    fn chosen(&self) -> Option<u64> {
        let most = self.clusters.values().map(BTreeSet::len).max()?;
        let mut those = self.clusters.iter().filter(|(_, nodes)| nodes.len() == most);
        those.next().filter(|_| those.next().is_none()).map(|(id, _)| *id)
    }

    /// Whether a session may use this node: its cluster is the chosen one, or no node contradicts.
    fn allows(&self, endpoint: &str) -> bool {
        let of = self.clusters.iter().find(|(_, nodes)| nodes.contains(endpoint)).map(|(id, _)| *id);
        self.clusters.len() < 2 || (of.is_some() && of == self.chosen())
    }
}

/// The last answers of the nodes; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterCheck(Arc<Mutex<Nodes>>);

impl ClusterCheck {
    pub(super) fn nodes(&self) -> Nodes {
        self.0.lock().clone()
    }

    /// Asks all nodes, the session's node over its own connection. Returns an error if the session must not use it.
    pub(super) async fn check(&self, config: &EtcdConfig, node: Node, client: &Client) -> Result<(), EtcdError> {
        let own = node.endpoint(config);
        let ask = |at: Node, endpoint: String| async move {
            let connected = if endpoint == own { Some(client.clone()) } else { None };
            let answer = status(config, at, connected).await;
            (endpoint, answer)
        };
        let answers = join_all(Node::all(config).map(|(at, endpoint)| ask(at, endpoint)));
        let mut nodes = Nodes::default();
        for (endpoint, answer) in answers.await {
            if let Ok((cluster, complaints)) = answer {
                nodes.add(&endpoint, cluster, &complaints);
            }
        }
        let (allowed, division) = (nodes.allows(own), nodes.division());
        *self.0.lock() = nodes;
        if let (false, Some(division)) = (allowed, division) { Err(EtcdError::Divided(division)) } else { Ok(()) }
    }

    /// Checks at an interval, until the session with `node` has to end.
    pub(super) async fn keep(&self, config: &EtcdConfig, node: Node, client: &Client) -> Result<Infallible, EtcdError> {
        loop {
            // With jitter, since many processes may have started together.
            sleep(ASK_EVERY.mul_f64(rand::random_range(0.5..1.0))).await;
            self.check(config, node, client).await?;
        }
    }
}

/// Cluster and complaints of one node. Over a separate connection a node without a leader answers, too.
async fn status(config: &EtcdConfig, node: Node, connected: Option<Client>) -> Result<(u64, Vec<String>), EtcdError> {
    let max = ANSWER_MAX.min(config.request_max());
    let mut client = match connected {
        Some(client) => client,
        None => connect_any(config, node, max).await?,
    };
    let status = within(max, "status", client.status()).await?;
    let cluster = status.header().map_or(0, |header| header.cluster_id());
    Ok((cluster, status.errors().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_held_with_the_cluster_of_most_nodes() {
        let of = |said: &[(&str, u64)]| {
            let mut nodes = Nodes::default();
            said.iter().for_each(|(endpoint, cluster)| nodes.add(endpoint, *cluster, &[]));
            ["a", "b", "c"].map(|endpoint| if nodes.allows(endpoint) { endpoint } else { "-" }).concat()
        };
        assert_eq!(of(&[]), "abc", "nobody answers: the session itself finds that out");
        assert_eq!(of(&[("a", 1), ("b", 1), ("c", 1)]), "abc");
        assert_eq!(of(&[("a", 1)]), "abc", "the others are away");
        assert_eq!(of(&[("a", 1), ("b", 2), ("c", 2)]), "-bc");
        assert_eq!(of(&[("a", 1), ("b", 1), ("c", 2)]), "ab-");
        assert_eq!(of(&[("a", 1), ("b", 2)]), "---", "two truths, and nothing that decides");
    }

    #[test]
    fn a_division_is_told_with_the_nodes_of_each_side() {
        let mut nodes = Nodes::default();
        nodes.add("http://a:1", 0xa1, &[]);
        assert_eq!(nodes.division(), None);
        nodes.add("http://b:1", 0xb2, &["memberID:1 alarm:NOSPACE ".into()]);
        let told = nodes.division().unwrap();
        assert!(told.contains("2 clusters: a1 at http://a:1 and b2 at http://b:1;"), "{told}");
        assert_eq!(nodes.complaints().collect::<Vec<_>>(), ["memberID:1 alarm:NOSPACE "]);
    }
}
