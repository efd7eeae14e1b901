//! 64 adapters of rank 8 over one base in bf16, 8 in a batch: the promise of many adapters.

use crate::setup::{alone, ask, prompt, request, sampling, until_listed, with_adapters, write};
use anyhow::ensure;
use baton_proto::v1::{GenerateRequest, PrefillPolicy};
use baton_tests::cluster::{Cluster, ClusterSpec};
use baton_tests::eventually::eventually;
use baton_tests::gates::Phase;
use baton_tests::quiet::until_quiet;
use baton_types::RequestId;
use futures::future::{try_join, try_join_all};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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
    // One prompt for all: what differs is of the adapters.
    let (prompt, sampling) = (prompt(1, 60), sampling(false, 48));
    let right: Vec<_> = names
        .iter()
        .map(|name| alone(Some(&folder.path().join(name)), &prompt, &sampling))
        .collect::<anyhow::Result<_>>()?;
    ensure!(right.iter().collect::<HashSet<_>>().len() == ADAPTERS, "two adapters answer alike");
    let (engine, largest) = (cluster.decode[0].loaded.engine.clone(), Arc::new(AtomicUsize::new(0)));
    let seen = largest.clone();
    let watch = tokio::spawn(async move {
        loop {
            seen.fetch_max(engine.load().running, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    // Each batch of 8 together, held until all are there; then all at once, so that most wait for a slot.
    for together in [BATCH, ADAPTERS] {
        for (names, right) in names.chunks(together).zip(right.chunks(together)) {
            let ids: Vec<RequestId> =
                names.iter().map(|name| RequestId::try_new(format!("{name}-{together}"))).collect::<Result<_, _>>()?;
            let is_held = together == BATCH;
            if is_held {
                ids.iter().for_each(|id| cluster.gates.hold(id.clone(), Phase::Decode));
            }
            let asked = names.iter().zip(&ids).map(|(name, id)| {
                let request = request(name, &prompt, &sampling, PrefillPolicy::Remote);
                ask(&client, GenerateRequest { request_id: id.to_string(), ..request })
            });
            let opened = async {
                let are_there = || ids.iter().all(|id| cluster.gates.reached(id, Phase::Decode));
                let all_decode = async || {
                    let largest = largest.load(Ordering::Relaxed);
                    ensure!(are_there() && largest >= BATCH, "only {largest} of {names:?} decode together");
                    Ok(())
                };
                if is_held {
                    eventually(all_decode).await?;
                }
                cluster.gates.open();
                Ok(())
            };
            let (got, ()) = try_join(try_join_all(asked), opened).await?;
            for ((name, got), right) in names.iter().zip(&got).zip(right) {
                ensure!(got == right, "{name}, {together} at once: {got:?}, alone {right:?}");
            }
        }
    }
    watch.abort();
    let largest = largest.load(Ordering::Relaxed);
    ensure!(largest == BATCH, "the largest batch was {largest}");
    let loaded: Vec<usize> = cluster.workers().filter_map(|w| w.adapters()).map(|a| a.counts().loaded).collect();
    ensure!(loaded == [BATCH, BATCH], "{loaded:?}");
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}
