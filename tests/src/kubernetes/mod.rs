//! `make test-k8s`: the chart on a real Kubernetes, with real containers, services, DNS and probes.
//!
//! Cases run one after another on one release and return their counts; the first failure ends the run. Objects are found by the labels
//! `app.kubernetes.io/instance` and `app.kubernetes.io/component`. The differences between the steps of a case are in values files
//! ([tests/kubernetes/values](../kubernetes/README.md)).

mod answers;
mod cases;
mod cluster;
mod etcd;
mod flows;
mod traffic;

use anyhow::Context as _;
use cluster::{Cluster, run as call};
use serde::Serialize;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder of the chart.
    pub chart: PathBuf,
    /// Folder of values files and manifests.
    pub values: PathBuf,
    /// Prefix of the image names.
    pub registry: String,
    /// Tag of the images.
    pub tag: String,
    /// Folder on the node for volumes if the node is the tests' own; `None` on an existing cluster.
    pub node: Option<PathBuf>,
    /// Where clients reach the service over gRPC, `http://host:port`; its cluster address if absent, which works on a node.
    pub grpc: Option<String>,
    /// The same for HTTP.
    pub http: Option<String>,
}

impl Settings {
    /// Folder for files of the run.
    fn scratch(&self) -> anyhow::Result<&Path> {
        self.node.as_deref().context("only on a node of the tests")
    }
}

/// The result of one case.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub case: &'static str,
    /// Its counts, in words.
    pub counts: Vec<String>,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// Runs all cases. Returns their counts, or the first failure.
pub async fn run(settings: &Settings) -> anyhow::Result<Vec<Outcome>> {
    let bench = Bench::prepare(settings).await?;
    let mut outcomes = Vec::new();
    let result = bench.cases(&mut outcomes).await;
    if let (Err(error), None) = (&result, &settings.node) {
        // An existing cluster is restored as far as possible; the tests' own cluster ends anyway.
        eprintln!("a case failed, the release is removed: {error:#}");
        let _ = bench.cluster.helm("uninstall", &["--wait"]).await;
    }
    result.map(|()| outcomes)
}

/// What all cases share.
pub(crate) struct Bench {
    pub(crate) settings: Settings,
    pub(crate) cluster: Cluster,
}

impl Bench {
    /// Prepares the namespace, with the strictest pod security level of Kubernetes, and on our own node the volumes.
    async fn prepare(settings: &Settings) -> anyhow::Result<Self> {
        let (namespace, release) = ("baton-test".to_owned(), "baton".to_owned());
        let cluster = Cluster { chart: settings.chart.clone(), namespace, release };
        let namespace = settings.values.join("namespace.yaml");
        cluster.kubectl(&["apply", "--filename", &namespace.display().to_string()]).await?;
        if let Some(node) = &settings.node {
            let volumes = std::fs::read_to_string(settings.values.join("volumes.yaml"))?;
            let model = model()?;
            let folders = [("MODELS", model), ("STATE", node.join("volumes"))];
            let etcd: Vec<String> =
                (0..3).map(|i| node.join(format!("volumes/etcd-{i}")).display().to_string()).collect();
            etcd.iter().try_for_each(std::fs::create_dir_all)?;
            let filled =
                folders.iter().fold(volumes, |text, (name, folder)| text.replace(name, &folder.display().to_string()));
            let file = node.join("volumes.yaml");
            std::fs::write(&file, filled)?;
            // etcd runs as an unprivileged user.
            call("chown", &[&["65532:65532".to_owned()][..], &etcd].concat(), Duration::from_secs(5)).await?;
            cluster.kubectl(&["apply", "--filename", &file.display().to_string()]).await?;
        }
        Ok(Self { settings: settings.clone(), cluster })
    }

    /// Values files of a step: those of every installation, and its own.
    pub(crate) fn values(&self, own: &[&str]) -> Vec<PathBuf> {
        ["base.yaml"].iter().chain(own).map(|file| self.settings.values.join(file)).collect()
    }

    pub(crate) fn images(&self) -> Vec<String> {
        vec![format!("image.registry={}", self.settings.registry), format!("image.tag={}", self.settings.tag)]
    }

    /// Where gRPC clients reach the service.
    pub(crate) async fn grpc(&self) -> anyhow::Result<String> {
        match &self.settings.grpc {
            Some(url) => Ok(url.clone()),
            None => self.cluster.service("router", "grpc").await,
        }
    }

    /// Where HTTP clients reach it.
    pub(crate) async fn http(&self) -> anyhow::Result<String> {
        match &self.settings.http {
            Some(url) => Ok(url.clone()),
            None => self.cluster.service("router", "http").await,
        }
    }

    async fn cases(&self, outcomes: &mut Vec<Outcome>) -> anyhow::Result<()> {
        one("installs, answers, moves KV", outcomes, cases::installs(self)).await?;
        one("network policies", outcomes, cases::policies(self)).await?;
        one("pods are killed", outcomes, cases::kills(self)).await?;
        one("upgrades under load", outcomes, cases::upgrades(self)).await?;
        one("a router starts without etcd", outcomes, etcd::starts_without(self)).await?;
        one("etcd grows by what Helm renders", outcomes, etcd::grows(self)).await?;
        one("uninstalls", outcomes, cases::uninstalls(self)).await?;
        if self.settings.node.is_some() {
            one("devices", outcomes, cases::devices(self)).await?;
        }
        Ok(())
    }
}

async fn one(
    case: &'static str,
    outcomes: &mut Vec<Outcome>,
    work: impl Future<Output = anyhow::Result<Vec<String>>>,
) -> anyhow::Result<()> {
    println!("{case} ...");
    let started = Instant::now();
    let counts = work.await.with_context(|| format!("case {case:?}"))?;
    let seconds = started.elapsed().as_secs_f64();
    counts.iter().for_each(|count| println!("  {count}"));
    println!("  {seconds:.0} s");
    outcomes.push(Outcome { case, counts, seconds });
    Ok(())
}

/// Folder of downloaded models, which `make model` fills.
fn model() -> anyhow::Result<PathBuf> {
    let cache = baton_node::environment::cache_home().context("no cache folder")?;
    let folder = cache.join("baton/models");
    anyhow::ensure!(
        folder.join("smollm2-135m-instruct").is_dir(),
        "no model in {}: run `make model`",
        folder.display()
    );
    Ok(Path::new(&folder).to_owned())
}
