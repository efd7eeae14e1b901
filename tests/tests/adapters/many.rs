//! 64 adapters of rank 8 over one base in bf16, 8 in a batch: the promise of many adapters.

use crate::setup::{alone, ask, prompt, request, sampling, until_listed, with_adapters, write};
use anyhow::ensure;
use baton_proto::v1::PrefillPolicy;
use baton_tests::cluster::{Cluster, ClusterSpec};
use baton_tests::quiet::until_quiet;
use futures::future::try_join_all;

const ADAPTERS: usize = 64;
const BATCH: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn each_of_64_adapters_answers_as_alone_with_8_in_a_batch() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let names: Vec<String> = (0..ADAPTERS).map(|i| format!("adapter-{i:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    write(folder.path(), &names)?;
    let mut config = with_adapters(Some(folder.path()));
    config.engine.lora.max_loras = BATCH;
    let cluster = Cluster::start(ClusterSpec::new(1, 1, &config)).await?;
    let client = cluster.client().await?;
    until_listed(&cluster, names[ADAPTERS - 1], true).await?;
    let sampling = sampling(false, 16);
    let right: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, name)| alone(Some(&folder.path().join(name)), &prompt(i, 60), &sampling))
        .collect::<anyhow::Result<_>>()?;
    // Each batch of 8 together; then all at once, so that most wait for a slot.
    for together in [BATCH, ADAPTERS] {
        for batch in names.chunks(together).zip(right.chunks(together)).enumerate() {
            let (chunk, (names, right)) = batch;
            let asked = names.iter().enumerate().map(|(i, name)| {
                ask(&client, request(name, &prompt(chunk * together + i, 60), &sampling, PrefillPolicy::Remote))
            });
            let got = try_join_all(asked).await?;
            for ((name, got), right) in names.iter().zip(&got).zip(right) {
                ensure!(got == right, "{name}, {together} at once: {got:?}, alone {right:?}");
            }
        }
    }
    let loaded: Vec<usize> = cluster.workers().filter_map(|w| w.adapters()).map(|a| a.counts().loaded).collect();
    ensure!(loaded == [BATCH, BATCH], "{loaded:?}");
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}
