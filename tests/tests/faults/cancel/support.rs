//! Clusters of these tests, the right answers, and requests that nobody disturbs.

use super::clients::{Ask, Clients, Front, PROMPTS};
use anyhow::{Context, ensure};
use baton_node::config::ByteSize;
use baton_proto::v1::PrefillPolicy;
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::scrape::Scrape;
use baton_worker::config::WorkerConfig;
use baton_worker::settings::TransportKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// A model that computes in no time: 384 bytes of KV a token, 6 KiB a block.
pub(crate) const MODEL: &str = "random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=1024,seed=11";
/// Bytes of one block of 16 tokens.
pub(crate) const BLOCK_BYTES: u64 = 16 * 384;
/// Most tokens of one chunk of a prefill.
pub(crate) const CHUNK_TOKENS: usize = 48;
/// Tokens of an undisturbed answer.
pub(crate) const ANSWER_TOKENS: u32 = 24;
/// Longest wait for anything that must come.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(60);

/// A worker of [`MODEL`] whose pool has so many blocks; prompts take several chunks.
pub(crate) fn config(transport: TransportKind, blocks: u64) -> WorkerConfig {
    let mut config = worker(MODEL);
    config.engine.kv_cache_bytes = ByteSize(blocks * BLOCK_BYTES);
    config.engine.chunk_tokens_max = CHUNK_TOKENS;
    config.transfer.transport = transport;
    config
}

/// A specification whose streams open early, so that clients of a stream hold one in every phase.
pub(crate) fn spec(prefill: usize, decode: usize, worker: &WorkerConfig) -> ClusterSpec {
    let mut spec = ClusterSpec::new(prefill, decode, worker);
    spec.router.http.sse_keepalive_ms = 50;
    spec
}

/// Policies in turn: mostly remote.
pub(crate) fn policy(n: usize) -> PrefillPolicy {
    if n % 4 == 3 { PrefillPolicy::Local } else { PrefillPolicy::Remote }
}

/// The right answers, by index: those of a cluster that serves one request at a time.
pub(crate) async fn right_answers(clients: &Clients, max_tokens: u32) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut answers = Vec::new();
    for index in 0..PROMPTS {
        let ask = Ask::new(format!("alone-{index}"), index, max_tokens, PrefillPolicy::Local);
        answers.push(clients.answer(Front::Grpc, &ask, None).await.context("a request alone")?);
    }
    let different: std::collections::HashSet<_> = answers.iter().collect();
    ensure!(different.len() == PROMPTS, "answers that are all different tell requests apart");
    Ok(answers)
}

/// Asks once over `front` and checks the answer.
pub(crate) async fn check(clients: &Clients, front: Front, ask: &Ask, right: &[Vec<u32>]) -> anyhow::Result<()> {
    let answer = clients.answer(front, ask, None).await.with_context(|| format!("{} over {front:?}", ask.id))?;
    let right = &right[ask.index][..ask.max_tokens as usize];
    ensure!(answer == right, "{} over {front:?}: {answer:?}, alone {right:?}", ask.id);
    Ok(())
}

/// `n` requests, `at_once` at a time, all of which must be answered right.
pub(crate) async fn all_right(
    clients: &Clients,
    name: &str,
    n: usize,
    right: &Arc<Vec<Vec<u32>>>,
) -> anyhow::Result<()> {
    let max_tokens = right[0].len() as u32;
    let mut running = JoinSet::new();
    for i in 0..n {
        let (clients, right) = (clients.clone(), right.clone());
        let ask = Ask::new(format!("{name}-{i}"), i, max_tokens, policy(i / 3));
        running.spawn(async move { check(&clients, Front::ALL[i % 3], &ask, &right).await });
        if running.len() >= 8 {
            running.join_next().await.context("eight are running")???;
        }
    }
    while let Some(result) = running.join_next().await {
        result??;
    }
    Ok(())
}

/// Clients that go on asking while others cancel.
pub(crate) struct Bystanders {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    running: JoinSet<anyhow::Result<()>>,
}

impl Bystanders {
    /// Starts `n` of them.
    pub(crate) fn start(n: usize, clients: &Clients, right: &Arc<Vec<Vec<u32>>>) -> Self {
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut running = JoinSet::new();
        for who in 0..n {
            let (clients, right, stop, served) = (clients.clone(), right.clone(), stop.clone(), served.clone());
            running.spawn(async move {
                let mut turn = who;
                while !stop.load(Ordering::Relaxed) {
                    let ask = Ask::new(format!("bystander-{who}-{turn}"), turn, ANSWER_TOKENS, policy(turn / 3));
                    check(&clients, Front::ALL[turn % 3], &ask, &right).await?;
                    served.fetch_add(1, Ordering::Relaxed);
                    turn += n;
                }
                Ok(())
            });
        }
        Self { stop, served, running }
    }

    /// Ends them; how many answers they got, all of them right.
    pub(crate) async fn stop(mut self) -> anyhow::Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(result) = self.running.join_next().await {
            result??;
        }
        Ok(self.served.load(Ordering::Relaxed))
    }
}

/// Waits until `condition` holds, at most [`WAIT_MAX`]; `what` says what did not come.
pub(crate) async fn until(what: impl Fn() -> String, mut condition: impl FnMut() -> bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + WAIT_MAX;
    while !condition() {
        ensure!(Instant::now() < deadline, "after {WAIT_MAX:?}: {}", what());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// The router's own gauge of requests: back to 0 when nobody asks.
pub(crate) async fn router_in_flight(cluster: &Cluster) -> anyhow::Result<u64> {
    let url = format!("http://{}/metrics", cluster.router.http_addr);
    Ok(Scrape::of(&url).await?.find("baton_router_requests_in_flight", &[])? as u64)
}
