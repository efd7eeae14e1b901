//! More requests than the limits take: typed refusals at once, right answers for all others, nothing left behind.

use super::clients::{Ask, Clients, Front, Refused};
use super::support::{ANSWER_TOKENS, WAIT_MAX, check, config, right_answers, spec, until};
use anyhow::{Context, ensure};
use baton_proto::v1::PrefillPolicy;
use baton_tests::cluster::{Cluster, ClusterSpec};
use baton_tests::gates::Phase;
use baton_tests::quiet::until_quiet;
use baton_worker::settings::TransportKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Requests sent at once.
const CROWD: usize = 40;

/// Sends a crowd of which at most `inside_max` fit, held in the queue, and lets those through.
async fn overload(spec: ClusterSpec, policy: PrefillPolicy, inside_max: usize) -> anyhow::Result<()> {
    let cluster = Cluster::start(spec).await?;
    let clients = Clients::of(&cluster).await?;
    let right = Arc::new(right_answers(&clients, ANSWER_TOKENS).await?);
    let mut crowd = JoinSet::new();
    for n in 0..CROWD {
        let ask = Ask::new(format!("crowd-{n}"), n, ANSWER_TOKENS, policy);
        cluster.gates.hold(ask.id.clone(), Phase::Queue);
        let (clients, right) = (clients.clone(), right.clone());
        crowd.spawn(async move { check(&clients, Front::ALL[n % 3], &ask, &right).await });
    }
    for _ in inside_max..CROWD {
        let result = tokio::time::timeout(WAIT_MAX, crowd.join_next()).await;
        let result = result.context("a refusal hangs")?.context("the crowd is larger")?;
        let error = result?.err().context("a request was answered although it is held")?;
        let refused = error.downcast::<Refused>()?;
        ensure!(refused.code == "overloaded" && refused.has_retry_hint, "{refused:?}");
    }
    ensure!(crowd.len() == inside_max, "{} are inside", crowd.len());
    cluster.gates.open();
    while let Some(result) = crowd.join_next().await {
        result??;
    }
    until_quiet(&cluster).await?;
    // The router hears of the room with the workers' next load reports; until then its refusals are right.
    let heard_by = Instant::now() + WAIT_MAX;
    for (n, front) in Front::ALL.into_iter().enumerate() {
        for attempt in 0.. {
            let ask = Ask::new(format!("after-{n}-{attempt}"), n, ANSWER_TOKENS, policy);
            match check(&clients, front, &ask, &right).await {
                Err(error) if Instant::now() < heard_by && is_overload(&error) => {
                    sleep(Duration::from_millis(20)).await
                }
                result => {
                    result?;
                    break;
                }
            }
        }
    }
    cluster.stop().await;
    Ok(())
}

fn is_overload(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|r| r.code == "overloaded" && r.has_retry_hint)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_over_its_limits_refuses_with_a_hint() -> anyhow::Result<()> {
    let mut spec = spec(1, 1, &config(TransportKind::Tcp, 1024));
    (spec.router.limits.running_max, spec.router.limits.queued_max) = (4, 6);
    overload(spec, PrefillPolicy::Remote, 10).await
}

#[tokio::test(flavor = "multi_thread")]
async fn full_prefill_workers_refuse_with_a_hint() -> anyhow::Result<()> {
    let mut worker = config(TransportKind::Tcp, 1024);
    worker.engine.waiting_max = 5;
    let mut spec = spec(1, 1, &worker);
    spec.decode[0].engine.waiting_max = 256;
    overload(spec, PrefillPolicy::Remote, 5).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_never_fits_is_refused_at_once() -> anyhow::Result<()> {
    let mut spec = spec(1, 1, &config(TransportKind::Tcp, 1024));
    spec.decode = vec![config(TransportKind::Tcp, 16)];
    let cluster = Cluster::start(spec).await?;
    let clients = Clients::of(&cluster).await?;
    for (n, front) in Front::ALL.into_iter().enumerate() {
        for policy in [PrefillPolicy::Local, PrefillPolicy::Remote] {
            let ask = Ask::new(format!("huge-{n}-{policy:?}"), 11, 200, policy);
            let error = clients.answer(front, &ask, None).await.err().context("376 tokens fit 256")?;
            let refused = error.downcast::<Refused>()?;
            ensure!(refused.code == "context_length_exceeded", "{refused:?}");
        }
    }
    until(|| "quiet".into(), || cluster.workers().all(|w| w.transfer.stats().sinks == 0)).await?;
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}
