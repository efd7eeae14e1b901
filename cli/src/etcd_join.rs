//! `baton etcd-join`: decides how a pod of a StatefulSet that runs etcd joins its cluster, and writes that into etcd's configuration file
//! before etcd starts. The nodes are `SET-0` to `SET-N` below one domain, as Kubernetes names them.

use anyhow::{Context, ensure};
use baton_node::membership::etcd::{EtcdConfig, ListedNode, Start, join};
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Most nodes of one etcd cluster; more would make it slower without making it safer.
const NODES_MAX: usize = 9;

/// Arguments of `baton etcd-join`.
#[derive(Args, Debug)]
pub(crate) struct EtcdJoinArgs {
    /// Name of this pod, which ends in its ordinal, e.g. etcd-0.
    #[arg(long)]
    pod: String,
    /// Number of nodes in the etcd cluster.
    #[arg(long)]
    nodes: usize,
    /// Domain of the pods' names.
    #[arg(long)]
    domain: String,
    /// Data directory of etcd.
    #[arg(long)]
    data: PathBuf,
    /// YAML file with the rest of etcd's configuration.
    #[arg(long)]
    config: PathBuf,
    /// File to write the complete configuration to.
    #[arg(long)]
    write: PathBuf,
    /// Peer address of etcd. Until etcd starts, this command answers the other nodes there that this node has no data.
    #[arg(long, default_value = "0.0.0.0:2380")]
    listen: SocketAddr,
    /// Folder with ca.crt, tls.crt and tls.key, if nodes use TLS.
    #[arg(long)]
    identity: Option<PathBuf>,
    /// Give up after this many seconds.
    #[arg(long, default_value_t = 600)]
    timeout_s: u64,
}

impl EtcdJoinArgs {
    /// The list of nodes, and this node's index in it.
    fn listed(&self) -> anyhow::Result<(Vec<ListedNode>, usize)> {
        let (set, number) = self
            .pod
            .rsplit_once('-')
            .context("--pod must be the name of a StatefulSet's pod, which ends in a number")?;
        let own: usize = number.parse().with_context(|| format!("--pod {:?} does not end in a number", self.pod))?;
        ensure!((1..=NODES_MAX).contains(&self.nodes), "--nodes must be 1 to {NODES_MAX}");
        ensure!(own < self.nodes, "{} is not one of the {} nodes of --nodes", self.pod, self.nodes);
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        let node = |at: usize| {
            let url = |port: u16| format!("{scheme}://{set}-{at}.{}:{port}", self.domain);
            ListedNode { name: format!("{set}-{at}"), client: url(2379), peer: url(2380) }
        };
        Ok(((0..self.nodes).map(node).collect(), own))
    }

    fn etcd(&self) -> EtcdConfig {
        let file = |name: &str| self.identity.as_ref().map(|folder| folder.join(name));
        EtcdConfig { ca: file("ca.crt"), cert: file("tls.crt"), key: file("tls.key"), ..EtcdConfig::default() }
    }
}

/// Waits until it is known how etcd has to start here, and writes that to the file.
pub(crate) async fn run(args: EtcdJoinArgs) -> anyhow::Result<()> {
    let (nodes, own) = args.listed()?;
    let max = Duration::from_secs(args.timeout_s);
    eprintln!("{} looks for its cluster among {} nodes", args.pod, nodes.len());
    let start = join(&nodes, own, &args.data, args.listen, &args.etcd(), max, |why| eprintln!("{why}")).await?;
    let rest =
        std::fs::read_to_string(&args.config).with_context(|| format!("cannot read {}", args.config.display()))?;
    let whole = format!("{}\n{}", rest.trim_end(), start.lines(&nodes[own]));
    std::fs::write(&args.write, whole).with_context(|| format!("cannot write {}", args.write.display()))?;
    match start {
        Start::Resume => eprintln!("resumes with this node's data"),
        Start::Begin { .. } => eprintln!("starts a new cluster: no other node has data"),
        Start::Join { nodes } => eprintln!("joins the cluster of {nodes}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EtcdJoinArgs,
    }

    fn args(pod: &str, more: &[&str]) -> EtcdJoinArgs {
        let pod = format!("--pod={pod}");
        let fixed = ["join", &pod, "--nodes=3", "--domain=e.ns.svc", "--data=/data", "--config=/c", "--write=/w"];
        Line::parse_from([&fixed, more].concat()).args
    }

    #[test]
    fn nodes_are_those_of_the_stateful_set() {
        let (nodes, own) = args("a-etcd-2", &[]).listed().unwrap();
        assert_eq!((nodes.len(), own), (3, 2));
        assert_eq!(nodes[0].name, "a-etcd-0");
        assert_eq!(nodes[1].client, "http://a-etcd-1.e.ns.svc:2379");
        assert_eq!(nodes[2].peer, "http://a-etcd-2.e.ns.svc:2380");
        let secure = args("a-etcd-0", &["--identity=/id"]);
        assert_eq!(secure.listed().unwrap().0[0].peer, "https://a-etcd-0.e.ns.svc:2380");
        assert_eq!(secure.etcd().ca, Some("/id/ca.crt".into()));
    }

    #[test]
    fn a_pod_beyond_the_list_is_refused() {
        for pod in ["a-etcd-3", "a-etcd", "etcd"] {
            assert!(args(pod, &[]).listed().is_err(), "{pod}");
        }
    }
}
