//! Adapters come, change and go while the cluster runs.

use crate::setup::{RANK, alone, ask, listed, prompt, request, sampling, spec, until_listed, with_adapters, write};
use anyhow::ensure;
use baton_proto::v1::PrefillPolicy;
use baton_tests::adapters::write_peft_folder;
use baton_tests::cluster::{Cluster, ClusterSpec};
use baton_tests::http::Api;
use serde_json::json;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn adapters_come_and_go_with_their_folders() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    write(folder.path(), &["first"])?;
    // What is no adapter is left out, and stops nobody.
    std::fs::create_dir(folder.path().join("empty"))?;
    let cluster = Cluster::start(ClusterSpec::new(1, 1, &with_adapters(Some(folder.path())))).await?;
    let (client, api) = (cluster.client().await?, Api::new(cluster.http()));
    until_listed(&cluster, "first", true).await?;
    ensure!(listed(&api).await?.iter().all(|name| name != "empty"));

    write_peft_folder(&folder.path().join("second"), &spec(), RANK, 9)?;
    until_listed(&cluster, "second", true).await?;
    let (prompt, sampling) = (prompt(3, 100), sampling(false, 12));
    let remote = |name| request(name, &prompt, &sampling, PrefillPolicy::Remote);
    let second = folder.path().join("second");
    let before = alone(Some(&second), &prompt, &sampling)?;
    ensure!(ask(&client, remote("second")).await? == before);

    // Another content under the same name: answers are wholly of the one or of the other, on both workers.
    write_peft_folder(&second, &spec(), RANK, 10)?;
    let after = alone(Some(&second), &prompt, &sampling)?;
    ensure!(before != after);
    let deadline = Instant::now() + crate::setup::WAIT_MAX;
    loop {
        // While only one worker has read it, there is no pair for the new content.
        match ask(&client, remote("second")).await {
            Ok(answer) if answer == after => break,
            Ok(answer) => ensure!(answer == before, "{answer:?} is of neither content"),
            Err(error) => {
                let status = error.downcast_ref::<tonic::Status>().map(tonic::Status::code);
                ensure!(status == Some(tonic::Code::Unavailable), "{error:#}");
            }
        }
        ensure!(Instant::now() < deadline, "the new content is never served");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    std::fs::remove_dir_all(folder.path().join("first"))?;
    until_listed(&cluster, "first", false).await?;
    let gone = api.post("completions", json!({"model": "first", "prompt": [1]})).await?;
    ensure!(gone.status == 404, "{gone:?}");
    ensure!(ask(&client, remote("second")).await? == after);
    cluster.stop().await;
    Ok(())
}
