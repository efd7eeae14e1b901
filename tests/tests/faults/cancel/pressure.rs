//! Pools too small for what is asked of them: reservations that wait, sequences that are preempted, and cancels among both.

use super::clients::{Ask, Clients, Front, PROMPTS, Refused};
use super::support::{ANSWER_TOKENS, Bystanders, WAIT_MAX, all_right, check, config, right_answers, spec, until};
use anyhow::{Context, ensure};
use baton_proto::v1::PrefillPolicy;
use baton_tests::cluster::Cluster;
use baton_tests::gates::Phase;
use baton_tests::quiet::until_quiet;
use baton_worker::settings::TransportKind;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Blocks of a decode worker that three held sequences nearly fill.
const SMALL_BLOCKS: u64 = 40;

/// Deadline of victims: long enough for all offers of a wave to come to a busy worker, short enough to wait for.
const GIVES_UP_AFTER: Duration = Duration::from_secs(15);

/// Offers that stand on a decode worker without a grant.
fn ungranted(cluster: &Cluster) -> usize {
    cluster.decode.iter().map(|w| w.transfer.stats()).map(|s| s.sinks.saturating_sub(s.tickets)).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn cancels_while_waiting_for_room_leak_nothing_and_keep_the_order() -> anyhow::Result<()> {
    let mut spec = spec(1, 1, &config(TransportKind::Ucx, 4096));
    spec.decode = vec![config(TransportKind::Ucx, SMALL_BLOCKS)];
    let cluster = Cluster::start(spec).await?;
    let clients = Clients::of(&cluster).await?;
    let right = Arc::new(right_answers(&clients, ANSWER_TOKENS).await?);
    for wave in 0..3 {
        // Three sequences of 10 or 11 blocks stay; less than the watermark and one prompt is left.
        let mut kept = JoinSet::new();
        let keep = |name: &str, n: usize| {
            Ask::new(format!("{name}-{wave}-{n}"), PROMPTS - 1 - n % 2, ANSWER_TOKENS, PrefillPolicy::Remote)
        };
        let spawn = |ask: Ask, front, kept: &mut JoinSet<anyhow::Result<()>>| {
            let (clients, right) = (clients.clone(), right.clone());
            kept.spawn(async move { check(&clients, front, &ask, &right).await });
        };
        let holders: Vec<Ask> = (0..3).map(|n| keep("holder", n)).collect();
        for ask in &holders {
            cluster.gates.hold(ask.id.clone(), Phase::Decode);
            spawn(ask.clone(), Front::Grpc, &mut kept);
        }
        let in_decode = || holders.iter().all(|ask| cluster.gates.reached(&ask.id, Phase::Decode));
        until(|| "the holders never came to decode".into(), in_decode).await?;
        let victims: Vec<_> = (0..6)
            .map(|n| {
                let ask = Ask::new(format!("victim-{wave}-{n}"), 4 + n % 3, ANSWER_TOKENS, PrefillPolicy::Remote);
                let (clients, front) = (clients.clone(), Front::ALL[n % 3]);
                let timeout = (n >= 3).then_some(GIVES_UP_AFTER);
                tokio::spawn(async move { clients.answer(front, &ask, timeout).await })
            })
            .collect();
        until(|| format!("{} offers wait", ungranted(&cluster)), || ungranted(&cluster) >= victims.len()).await?;
        // They stand behind those who will give up.
        for (n, front) in Front::ALL.into_iter().enumerate() {
            spawn(keep("patient", n), front, &mut kept);
        }
        until(|| format!("{} offers wait", ungranted(&cluster)), || ungranted(&cluster) >= victims.len() + 3).await?;
        for (n, victim) in victims.into_iter().enumerate() {
            if n < 3 {
                victim.abort();
            }
            ensure!(!victim.await.is_ok_and(|answer| answer.is_ok()), "victim {n} was answered without room");
        }
        until(|| format!("{} offers wait", ungranted(&cluster)), || ungranted(&cluster) == 3).await?;
        cluster.gates.open();
        while let Some(result) = kept.join_next().await {
            result??;
        }
        until_quiet(&cluster).await?;
    }
    all_right(&clients, "after", 40, &right).await?;
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_room_goes_to_a_worker_that_has_some() -> anyhow::Result<()> {
    let roomy = config(TransportKind::Ucx, 4096);
    let mut spec = spec(1, 1, &roomy);
    spec.decode = vec![config(TransportKind::Ucx, SMALL_BLOCKS)];
    let mut cluster = Cluster::start(spec).await?;
    let clients = Clients::of(&cluster).await?;
    let right = Arc::new(right_answers(&clients, ANSWER_TOKENS).await?);
    let mut asked = JoinSet::new();
    let mut ask = |name: &str, n: usize| {
        let ask = Ask::new(format!("{name}-{n}"), PROMPTS - 1, ANSWER_TOKENS, PrefillPolicy::Remote);
        let (id, clients, right) = (ask.id.clone(), clients.clone(), right.clone());
        if name == "holder" {
            cluster.gates.hold(id.clone(), Phase::Decode);
        }
        asked.spawn(async move { check(&clients, Front::ALL[n % 3], &ask, &right).await.map(|()| ask.id) });
        id
    };
    let holders: Vec<_> = (0..3).map(|n| ask("holder", n)).collect();
    let in_decode = || holders.iter().all(|id| cluster.gates.reached(id, Phase::Decode));
    until(|| "the holders never came to decode".into(), in_decode).await?;
    let mut waiting: HashSet<_> = (0..3).map(|n| ask("waiting", n)).collect();
    until(|| format!("{} offers wait", ungranted(&cluster)), || ungranted(&cluster) == 3).await?;
    cluster.add(false, &roomy, "decode-late").await?;
    // The holders stay where they are, so nothing else can make room.
    while !waiting.is_empty() {
        let done = timeout(WAIT_MAX, asked.join_next()).await.context("it waits although another has room")?;
        waiting.remove(&done.context("all are asked")???);
    }
    until(|| format!("{} offers wait still", ungranted(&cluster)), || ungranted(&cluster) == 0).await?;
    cluster.gates.open();
    while let Some(result) = asked.join_next().await {
        result??;
    }
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}

/// Asks again while the workers say that they are full.
async fn patiently(clients: &Clients, front: Front, ask: &Ask, right: &[Vec<u32>]) -> anyhow::Result<()> {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let Err(error) = check(clients, front, ask, right).await else { return Ok(()) };
        // A stream that is open already can give no hint in its headers.
        let says_full = |r: &Refused| r.code == "overloaded" && (r.has_retry_hint || front == Front::Sse);
        let is_full = error.downcast_ref::<Refused>().is_some_and(says_full);
        if !is_full || Instant::now() >= deadline {
            return Err(error);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn preempted_sequences_answer_alike_while_others_cancel() -> anyhow::Result<()> {
    let long = 160;
    let mut spec = spec(1, 1, &config(TransportKind::Ucx, 4096));
    spec.decode = vec![config(TransportKind::Ucx, 2 * SMALL_BLOCKS)];
    let cluster = Cluster::start(spec).await?;
    let clients = Clients::of(&cluster).await?;
    let right = Arc::new(right_answers(&clients, long).await?);
    let preemptions = || cluster.decode[0].loaded.engine.load().preemptions;
    ensure!(preemptions() == 0, "a request alone is never preempted");
    let (mut kept, mut given_up) = (JoinSet::new(), JoinSet::new());
    for n in 0..48usize {
        let (clients, right) = (clients.clone(), right.clone());
        let policy = if n.is_multiple_of(2) { PrefillPolicy::Local } else { PrefillPolicy::Remote };
        let ask = Ask::new(format!("pressed-{n}"), n, long, policy);
        if n.is_multiple_of(3) {
            let patience = Duration::from_millis(20 + 15 * n as u64);
            given_up.spawn(async move {
                tokio::time::timeout(patience, clients.answer(Front::ALL[n % 2], &ask, None)).await
            });
        } else {
            kept.spawn(async move { patiently(&clients, Front::ALL[n % 3], &ask, &right).await });
        }
    }
    while let Some(result) = kept.join_next().await {
        result??;
    }
    given_up.join_all().await;
    ensure!(preemptions() > 0, "the pool was never full");
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "make test-full"]
async fn random_cancels_for_two_minutes() -> anyhow::Result<()> {
    let seed = u64::from(rand::random::<u32>());
    println!("seed {seed}");
    for (round, transport) in [TransportKind::Ucx, TransportKind::Tcp].into_iter().enumerate() {
        let mut spec = spec(2, 2, &config(transport, 256));
        spec.decode = vec![config(transport, 4 * SMALL_BLOCKS); 2];
        let cluster = Cluster::start(spec).await?;
        let clients = Clients::of(&cluster).await?;
        let right = Arc::new(right_answers(&clients, ANSWER_TOKENS).await?);
        let bystanders = Bystanders::start(3, &clients, &right);
        let until = Instant::now() + Duration::from_secs(60);
        let mut crowd = JoinSet::new();
        for who in 0..16 {
            let clients = clients.clone();
            crowd.spawn(async move {
                let mut rng = StdRng::seed_from_u64(seed + (100 * round + who) as u64);
                for n in 0.. {
                    if Instant::now() >= until {
                        break;
                    }
                    let policy = [PrefillPolicy::Local, PrefillPolicy::Remote][rng.random_range(0..2)];
                    let ask = Ask::new(
                        format!("crowd-{who}-{n}"),
                        rng.random_range(0..PROMPTS),
                        rng.random_range(1..200),
                        policy,
                    );
                    let front = Front::ALL[rng.random_range(0..3)];
                    let patience = Duration::from_micros(rng.random_range(0..300_000));
                    let deadline = rng.random_bool(0.5).then_some(patience);
                    let _ = tokio::time::timeout(patience * 2, clients.answer(front, &ask, deadline)).await;
                }
            });
        }
        crowd.join_all().await;
        println!("bystanders got {} answers", bystanders.stop().await?);
        until_quiet(&cluster).await?;
        all_right(&clients, "after", 100, &right).await?;
        until_quiet(&cluster).await?;
        cluster.stop().await;
    }
    Ok(())
}
