//! `make test-k8s`: the cases on a cluster that `kubectl` and `helm` reach by KUBECONFIG. `tests/kubernetes/run` starts one and runs this.

use baton_tests::kubernetes::{Settings, run};
use clap::Parser;
use std::path::PathBuf;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

#[derive(Parser)]
struct Cli {
    /// Prefix of the images' names, without the last slash
    #[arg(long)]
    registry: String,
    /// Tag of the images
    #[arg(long)]
    tag: String,
    /// The folder in which the node's state is, where this runs on a node of the tests' own: cases that need its disk run too
    #[arg(long)]
    node: Option<PathBuf>,
    /// http://host:port of the router's gRPC, where its cluster address is not reached from here
    #[arg(long)]
    grpc: Option<String>,
    /// http://host:port of the router's HTTP API, where its cluster address is not reached from here
    #[arg(long)]
    http: Option<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Cli { registry, tag, node, grpc, http } = Cli::parse();
    let here = PathBuf::from(HERE);
    let settings = Settings {
        chart: here.join("../deploy/helm/baton"),
        values: here.join("kubernetes/values"),
        registry,
        tag,
        node,
        grpc,
        http,
    };
    let outcomes = run(&settings).await?;
    let folder = here.join("../target/kubernetes");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("summary.json"), serde_json::to_string_pretty(&outcomes)?)?;
    println!("{} cases hold; the counts are in target/kubernetes/summary.json", outcomes.len());
    Ok(())
}
