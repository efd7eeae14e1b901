//! Requests with adapters, and what they must be answered.

use anyhow::{Context, ensure};
use baton_engine::families::DecoderSpec;
use baton_engine::formats::{ModelSource as _, RandomModel};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, PrefillPolicy, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::adapters::{Alone, Tokens, write_peft_folder};
use baton_tests::cluster::{Cluster, worker};
use baton_tests::http::Api;
use baton_types::{SamplingParams, TokenId};
use baton_worker::config::WorkerConfig;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// A model that computes in no time.
pub(crate) const MODEL: &str = "random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=512,seed=11";
/// Longest wait for anything that must come.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(60);
/// Rank of the adapters.
pub(crate) const RANK: usize = 8;

pub(crate) fn model() -> RandomModel {
    RandomModel::parse(MODEL).expect("a sound model")
}

pub(crate) fn spec() -> DecoderSpec {
    model().spec().clone()
}

/// A worker that serves the adapters of a folder, or none.
pub(crate) fn with_adapters(folder: Option<&Path>) -> WorkerConfig {
    let mut config = worker(MODEL);
    config.engine.chunk_tokens_max = 48;
    config.engine.lora.folder = folder.map(Path::to_owned);
    config.engine.lora.reread_ms = 100;
    // Tests wait for slots on busy machines.
    config.engine.lora.wait_ms_max = 60_000;
    config
}

/// Writes adapters with these names; the seed of each is its number.
pub(crate) fn write(folder: &Path, names: &[&str]) -> anyhow::Result<()> {
    let numbered = names.iter().zip(1..);
    numbered.into_iter().try_for_each(|(name, seed)| write_peft_folder(&folder.join(name), &spec(), RANK, seed))
}

pub(crate) fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| ((i * 31 + seed * 7) % 251) as TokenId).collect()
}

/// Greedy, or drawn with penalties.
pub(crate) fn sampling(drawn: bool, max_tokens: u32) -> SamplingParams {
    let greedy = SamplingParams {
        temperature: 0.0,
        max_tokens,
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::default()
    };
    if !drawn {
        return greedy;
    }
    SamplingParams { temperature: 1.1, top_p: 0.97, frequency_penalty: 0.3, seed: 77, ..greedy }
}

/// The same, as a client states it.
fn stated(sampling: &SamplingParams) -> Sampling {
    Sampling {
        temperature: Some(sampling.temperature),
        top_p: Some(sampling.top_p),
        frequency_penalty: Some(sampling.frequency_penalty),
        seed: Some(sampling.seed),
        max_tokens: Some(sampling.max_tokens),
        ignore_eos: true,
        logprobs: Some(0),
        ..Default::default()
    }
}

/// A request for a model or an adapter; an empty name is the base model.
pub(crate) fn request(
    name: &str,
    prompt: &[TokenId],
    sampling: &SamplingParams,
    policy: PrefillPolicy,
) -> GenerateRequest {
    GenerateRequest {
        model: name.to_owned(),
        prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt.to_vec() })) }],
        sampling: Some(stated(sampling)),
        prefill_policy: policy.into(),
        ..Default::default()
    }
}

/// Sends a request, and checks that the answer names what was asked for.
pub(crate) async fn ask(client: &InferenceClient<Channel>, request: GenerateRequest) -> anyhow::Result<Tokens> {
    let name = request.model.clone();
    let mut stream = client.clone().generate(request).await?.into_inner();
    let mut tokens = Tokens::new();
    while let Some(message) = stream.message().await? {
        let bits = message.logprobs.iter().map(|l| l.chosen.to_bits());
        tokens.extend(message.token_ids.iter().copied().zip(bits));
        ensure!(name.is_empty() || message.model.is_empty() || message.model == name, "{name}: {}", message.model);
    }
    Ok(tokens)
}

/// What one engine answers that has this adapter alone, or none.
pub(crate) fn alone(folder: Option<&Path>, prompt: &[TokenId], sampling: &SamplingParams) -> anyhow::Result<Tokens> {
    Alone::start(&model(), folder)?.answer(prompt, sampling.clone())
}

/// Names that the cluster lists.
pub(crate) async fn listed(api: &Api) -> anyhow::Result<Vec<String>> {
    let models = api.get("models").await?.body;
    let names = models["data"].as_array().context("a list")?.iter().filter_map(|m| m["id"].as_str());
    Ok(names.map(str::to_owned).collect())
}

/// The entry of a name, once it is listed as often as `expected`: never, or once.
pub(crate) async fn until_listed(cluster: &Cluster, name: &str, expected: bool) -> anyhow::Result<Value> {
    let api = Api::new(cluster.http());
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let models = api.get("models").await?.body;
        let entry = models["data"].as_array().into_iter().flatten().find(|m| m["id"] == name).cloned();
        if entry.is_some() == expected {
            return Ok(entry.unwrap_or_default());
        }
        ensure!(Instant::now() < deadline, "{name} is listed: {}; expected {expected}", entry.is_some());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
