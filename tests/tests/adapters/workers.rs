//! Which workers get a request with an adapter, and what happens when one of them stops.

use crate::setup::{WAIT_MAX, alone, ask, prompt, request, sampling, until_listed, with_adapters, write};
use anyhow::{Context, ensure};
use baton_node::{DrainConfig, Shutdown};
use baton_proto::v1::PrefillPolicy;
use baton_tests::cluster::{Cluster, ClusterSpec};
use baton_tests::gates::Phase;
use baton_tests::quiet::until_quiet;
use baton_types::RequestId;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn workers_without_the_adapter_are_never_chosen() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    write(folder.path(), &["sql"])?;
    let (has, lacks) = (with_adapters(Some(folder.path())), with_adapters(None));
    let mut spec = ClusterSpec::new(0, 0, &has);
    // The second prefill worker comes later.
    (spec.prefill, spec.decode) = (vec![lacks.clone()], vec![lacks, has.clone()]);
    let mut cluster = Cluster::start(spec).await?;
    let client = cluster.client().await?;
    until_listed(&cluster, "sql", true).await?;
    let (prompt, sampling) = (prompt(5, 300), sampling(false, 8));
    let right = alone(Some(&folder.path().join("sql")), &prompt, &sampling)?;
    let steps = |cluster: &Cluster| cluster.workers().map(|w| w.loaded.engine.load().steps).collect::<Vec<_>>();
    // A long prompt, which has no prefill worker with its adapter.
    for _ in 0..3 {
        ensure!(ask(&client, request("sql", &prompt, &sampling, PrefillPolicy::Auto)).await? == right);
    }
    ensure!(
        matches!(steps(&cluster)[..], [0, 0, busy] if busy > 0),
        "prefill-0, decode-0, decode-1: {:?}",
        steps(&cluster)
    );
    let error = ask(&client, request("sql", &prompt, &sampling, PrefillPolicy::Remote)).await.unwrap_err();
    let status = error.downcast_ref::<tonic::Status>().context("a status")?;
    ensure!(status.code() == tonic::Code::Unavailable && status.message().contains("prefill worker"), "{status:?}");

    cluster.add(true, &has, "prefill-1").await?;
    let deadline = Instant::now() + WAIT_MAX;
    while let Err(error) = ask(&client, request("sql", &prompt, &sampling, PrefillPolicy::Remote)).await {
        ensure!(Instant::now() < deadline, "{error:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ensure!(ask(&client, request("sql", &prompt, &sampling, PrefillPolicy::Remote)).await? == right);
    let [first, second, third, _] = steps(&cluster)[..] else { anyhow::bail!("four workers") };
    ensure!((first, third) == (0, 0) && second > 0, "prefill-0, prefill-1, decode-0: {:?}", steps(&cluster));
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_goes_on_with_its_adapter_when_the_decode_worker_stops() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    write(folder.path(), &["sql"])?;
    let mut cluster = Cluster::start(ClusterSpec::new(1, 2, &with_adapters(Some(folder.path())))).await?;
    let client = cluster.client().await?;
    until_listed(&cluster, "sql", true).await?;
    for (drawn, policy) in [(false, PrefillPolicy::Remote), (true, PrefillPolicy::Local)] {
        let (prompt, sampling) = (prompt(usize::from(drawn), 150), sampling(drawn, 40));
        let right = alone(Some(&folder.path().join("sql")), &prompt, &sampling)?;
        let id = RequestId::try_new(format!("held-{drawn}"))?;
        cluster.gates.hold_later(id.clone(), Phase::Decode, 30);
        let held = baton_proto::v1::GenerateRequest {
            request_id: id.as_str().into(),
            ..request("sql", &prompt, &sampling, policy)
        };
        let asking = client.clone();
        let call = tokio::spawn(async move { ask(&asking, held).await });
        let deadline = Instant::now() + WAIT_MAX;
        let busy = loop {
            let runs = |w: &baton_worker::process::RunningWorker| w.loaded.engine.load().running > 0;
            let busy = cluster.decode.iter().position(runs);
            if let Some(busy) = busy.filter(|_| cluster.gates.reached(&id, Phase::Decode)) {
                break busy;
            }
            ensure!(Instant::now() < deadline, "{id} never came to its decode");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let stopped = cluster.decode.remove(busy);
        let shutdown = Shutdown::new(&DrainConfig { drain_ms_max: 1, ..DrainConfig::default() });
        shutdown.request("the test stops it");
        let stopped = tokio::spawn(async move { stopped.stop(&shutdown).await });
        cluster.add(false, &with_adapters(Some(folder.path())), &format!("another-{drawn}")).await?;
        cluster.gates.open();
        let got = call.await?.with_context(|| id.to_string())?;
        ensure!(got == right, "{id}: {got:?}, alone {right:?}");
        stopped.await?;
        until_quiet(&cluster).await?;
    }
    cluster.stop().await;
    Ok(())
}
