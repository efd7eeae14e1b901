//! A decode worker with a draft model, behind a real handoff: the tokens are those without one, and nothing of it is held at the end.

use crate::cluster_answers::{Tokens, ask};
use anyhow::ensure;
use baton_proto::v1::{self, PrefillPolicy};
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::quiet::until_quiet;
use futures::future::try_join_all;

const MODEL: &str = "random:hidden=96,layers=2,heads=4,kv_heads=2,vocab=300,context=512,seed=41";
/// Other weights, and fewer of them.
const OTHER: &str = "random:hidden=32,layers=1,heads=2,kv_heads=1,vocab=300,context=512,seed=42";

async fn answers(cluster: &Cluster) -> anyhow::Result<Vec<Tokens>> {
    let client = cluster.client().await?;
    let asked = (0..8u32).map(|i| {
        let ids: Vec<u32> = (0..40 + 30 * i).map(|t| (t * t + 7 * i) % 290).collect();
        let sampling = v1::Sampling {
            temperature: Some(if i % 2 == 0 { 0.0 } else { 1.0 }),
            seed: Some(u64::from(i)),
            max_tokens: Some(120),
            ignore_eos: true,
            ..Default::default()
        };
        let policy = if i % 4 < 2 { PrefillPolicy::Remote } else { PrefillPolicy::Local };
        ask(client.clone(), ids, sampling, policy)
    });
    try_join_all(asked).await
}

/// Ends calls after their first tokens.
async fn cancel_some(cluster: &Cluster) -> anyhow::Result<()> {
    for i in 0..6u32 {
        let ids = (0..100 + i).map(|t| t % 290).collect();
        let request = v1::GenerateRequest {
            prompt: vec![v1::Segment { kind: Some(v1::segment::Kind::Tokens(v1::TokenIds { ids })) }],
            sampling: Some(v1::Sampling { max_tokens: Some(400), ignore_eos: true, ..Default::default() }),
            ..Default::default()
        };
        let mut stream = cluster.client().await?.generate(request).await?.into_inner();
        for _ in 0..1 + 5 * i {
            ensure!(stream.message().await?.is_some(), "call {i} ended by itself");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_changes_no_token_and_holds_nothing_at_the_end() -> anyhow::Result<()> {
    let plain = Cluster::start(ClusterSpec::new(1, 1, &worker(MODEL))).await?;
    let expected = answers(&plain).await?;
    plain.stop().await;
    for draft in [MODEL, OTHER] {
        let mut config = worker(MODEL);
        config.engine.speculation.draft_model = draft.into();
        let cluster = Cluster::start(ClusterSpec::new(1, 1, &config)).await?;
        for round in 0..2 {
            ensure!(answers(&cluster).await? == expected, "round {round} with {draft}");
        }
        cancel_some(&cluster).await?;
        until_quiet(&cluster).await?;
        let (of_prefill, of_decode) = (cluster.prefill[0].loaded.engine.load(), cluster.decode[0].loaded.engine.load());
        ensure!(of_decode.draft_proposed_tokens > 0, "{draft} proposed nothing: {of_decode:?}");
        ensure!(draft == OTHER || of_decode.draft_accepted_tokens > 0, "the model itself was never right");
        ensure!(of_prefill.draft_proposed_tokens == 0, "a prefill worker has no draft model");
        cluster.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_of_other_tokens_ends_the_start_of_a_decode_worker() -> anyhow::Result<()> {
    let mut config = worker(MODEL);
    config.engine.speculation.draft_model = "random:layers=1,vocab=301".into();
    let refused = Cluster::start(ClusterSpec::new(0, 1, &config)).await.err().map(|error| format!("{error:#}"));
    ensure!(refused.as_ref().is_some_and(|why| why.contains("300") && why.contains("301")), "{refused:?}");
    // A prefill worker does not read it.
    let cluster = Cluster::start(ClusterSpec::new(1, 0, &config)).await?;
    cluster.stop().await;
    Ok(())
}
