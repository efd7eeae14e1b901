//! Adapters and the base model in one batch, prefilled here and there, cached and not, evicted and loaded again.

use crate::setup::{MODEL, alone, ask, prompt, request, sampling, until_listed, with_adapters, write};
use anyhow::ensure;
use baton_proto::v1::PrefillPolicy;
use baton_tests::cluster::{Cluster, ClusterSpec};
use baton_tests::http::Api;
use baton_tests::logs;
use baton_tests::quiet::until_quiet;
use futures::future::try_join_all;
use serde_json::json;

const NAMES: [&str; 3] = ["sql", "support", "tone"];

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_of_one_engine_with_the_adapter_alone() -> anyhow::Result<()> {
    logs::watch();
    let folder = tempfile::tempdir()?;
    write(folder.path(), &NAMES)?;
    let mut config = with_adapters(Some(folder.path()));
    // One adapter must always wait, or be loaded again.
    config.engine.lora.max_loras = 2;
    let cluster = Cluster::start(ClusterSpec::new(1, 1, &config)).await?;
    let client = cluster.client().await?;
    for name in NAMES {
        let entry = until_listed(&cluster, name, true).await?;
        ensure!(entry["parent"] == MODEL && entry["root"] == name, "{entry}");
    }

    for drawn in [false, true] {
        let (prompt, sampling) = (prompt(0, 150), sampling(drawn, 24));
        let names: Vec<&str> = [""].into_iter().chain(NAMES).collect();
        let right: Vec<_> = names
            .iter()
            .map(|name| {
                let of = folder.path().join(name);
                alone((!name.is_empty()).then_some(&of), &prompt, &sampling)
            })
            .collect::<anyhow::Result<_>>()?;
        for (i, other) in right.iter().enumerate() {
            ensure!(right[..i].iter().all(|earlier| earlier != other), "adapters that change nothing prove nothing");
        }
        // All at once, each on both ways: blocks of one prompt with different adapters are different blocks. The second round finds its
        // own cached.
        for round in 0..2 {
            for policy in [PrefillPolicy::Remote, PrefillPolicy::Local] {
                let asked = names.iter().map(|name| ask(&client, request(name, &prompt, &sampling, policy)));
                let got = try_join_all(asked).await?;
                for ((name, got), right) in names.iter().zip(&got).zip(&right) {
                    ensure!(got == right, "{name:?}, {policy:?}, round {round}: {got:?}, alone {right:?}");
                }
            }
        }
    }
    // Three adapters took turns in two slots.
    for worker in cluster.workers() {
        ensure!(worker.adapters().is_some_and(|adapters| adapters.counts().loaded == 2), "both slots are in use");
    }

    let api = Api::new(cluster.http());
    let unknown = api.post("completions", json!({"model": "nobody", "prompt": [1]})).await?;
    let message = unknown.body["error"]["message"].as_str().unwrap_or_default().to_owned();
    ensure!(unknown.status == 404 && NAMES.iter().all(|name| message.contains(name)), "{unknown:?}");
    let answer = api.post("completions", json!({"model": "tone", "prompt": [1, 2, 3], "max_tokens": 2})).await?;
    ensure!(answer.status == 200 && answer.body["model"] == "tone", "{answer:?}");
    until_quiet(&cluster).await?;
    cluster.stop().await;
    logs::no_errors()
}
