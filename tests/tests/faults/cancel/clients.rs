//! Requests as clients send them, over gRPC and over HTTP, whole or given up.

use anyhow::{Context, bail, ensure};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, PrefillPolicy, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::cluster::Cluster;
use baton_types::RequestId;
use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;
use tonic::transport::Channel;

/// One request: prompts and parameters follow from `index`, so that equal indices have equal answers.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) id: RequestId,
    pub(crate) index: usize,
    pub(crate) max_tokens: u32,
    pub(crate) policy: PrefillPolicy,
}

/// Tokens of the smallest and largest prompt.
const PROMPT_MIN: usize = 33;
const PROMPT_STEP: usize = 13;
/// Different prompts.
pub(crate) const PROMPTS: usize = 12;

impl Ask {
    pub(crate) fn new(id: String, index: usize, max_tokens: u32, policy: PrefillPolicy) -> Self {
        Self { id: RequestId::try_new(id).expect("test ids are names"), index: index % PROMPTS, max_tokens, policy }
    }

    /// 33 to 176 tokens.
    pub(crate) fn prompt(&self) -> Vec<u32> {
        let len = PROMPT_MIN + PROMPT_STEP * self.index;
        (0..len).map(|i| ((i * 31 + self.index * 97) % 251) as u32).collect()
    }

    /// Greedy, or drawn with a fixed seed.
    fn temperature(&self) -> f32 {
        if self.index.is_multiple_of(2) { 0.0 } else { 0.9 }
    }

    fn grpc(&self) -> GenerateRequest {
        let prompt = vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: self.prompt() })) }];
        let sampling = Sampling {
            temperature: Some(self.temperature()),
            seed: Some(self.index as u64),
            max_tokens: Some(self.max_tokens),
            ignore_eos: true,
            ..Sampling::default()
        };
        GenerateRequest {
            prompt,
            sampling: Some(sampling),
            request_id: self.id.to_string(),
            prefill_policy: self.policy.into(),
            // Each has its prompt to itself, to compute, to ship and to hold, as the phases and the room that are tested take it.
            cache_salt: Some(self.id.to_string()),
            ..GenerateRequest::default()
        }
    }

    fn http(&self, model: &str, stream: bool) -> Value {
        let policy = match self.policy {
            PrefillPolicy::Local => "local",
            PrefillPolicy::Remote => "remote",
            _ => "auto",
        };
        json!({
            "model": model, "prompt": self.prompt(), "temperature": self.temperature(), "seed": self.index,
            "max_tokens": self.max_tokens, "ignore_eos": true, "return_token_ids": true, "stream": stream,
            "prefill_policy": policy, "cache_salt": self.id.as_str(),
        })
    }
}

/// How a request travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Front {
    Grpc,
    Sse,
    Json,
}

impl Front {
    pub(crate) const ALL: [Self; 3] = [Self::Grpc, Self::Sse, Self::Json];
}

/// How a request ended that got no whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Name of the kind: of the status over gRPC, `error.code` (or type) over HTTP.
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) has_retry_hint: bool,
}

impl std::error::Error for Refused {}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// Clients of one cluster.
#[derive(Clone)]
pub(crate) struct Clients {
    grpc: InferenceClient<Channel>,
    grpc_url: String,
    http: reqwest::Client,
    http_url: String,
    model: String,
}

impl Clients {
    pub(crate) async fn of(cluster: &Cluster) -> anyhow::Result<Self> {
        let http = reqwest::Client::new();
        let models: Value = http.get(format!("{}/models", cluster.http())).send().await?.json().await?;
        let model = models["data"][0]["id"].as_str().context("no model is served")?.to_owned();
        Ok(Self {
            grpc: cluster.client().await?,
            grpc_url: format!("http://{}", cluster.router.grpc_addr),
            http,
            http_url: format!("{}/completions", cluster.http()),
            model,
        })
    }

    /// The whole answer: its token ids. A refusal is a [`Refused`].
    pub(crate) async fn answer(&self, front: Front, ask: &Ask, timeout: Option<Duration>) -> anyhow::Result<Vec<u32>> {
        let tokens = match front {
            // Half of the callers share a connection, so that giving up resets a stream; the others close theirs.
            Front::Grpc if ask.index.is_multiple_of(2) => grpc(self.grpc.clone(), ask, timeout).await?,
            Front::Grpc => grpc(InferenceClient::connect(self.grpc_url.clone()).await?, ask, timeout).await?,
            Front::Sse => self.sse(ask, timeout).await?,
            Front::Json => self.json(ask, timeout).await?,
        };
        ensure!(tokens.len() == ask.max_tokens as usize, "{} ended after {} tokens", ask.id, tokens.len());
        Ok(tokens)
    }

    async fn post(&self, ask: &Ask, timeout: Option<Duration>, stream: bool) -> anyhow::Result<reqwest::Response> {
        let request = self.http.post(&self.http_url).header("x-request-id", ask.id.as_str());
        let request = match timeout {
            Some(timeout) => request.header("x-request-timeout", format!("{}ms", timeout.as_millis())),
            None => request,
        };
        let response = request.json(&ask.http(&self.model, stream)).send().await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let has_retry_hint = response.headers().contains_key("retry-after");
        let body: Value = response.json().await?;
        Err(refused(&body["error"], has_retry_hint).into())
    }

    async fn json(&self, ask: &Ask, timeout: Option<Duration>) -> anyhow::Result<Vec<u32>> {
        let body: Value = self.post(ask, timeout, false).await?.json().await?;
        token_ids(&body)
    }

    async fn sse(&self, ask: &Ask, timeout: Option<Duration>) -> anyhow::Result<Vec<u32>> {
        let mut response = self.post(ask, timeout, true).await?;
        let (mut buffer, mut tokens) = (Vec::new(), Vec::new());
        while let Some(bytes) = response.chunk().await? {
            buffer.extend_from_slice(&bytes);
            while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event = String::from_utf8(buffer.drain(..end + 2).collect())?;
                match event.trim_end().strip_prefix("data: ") {
                    None => ensure!(event.starts_with(':'), "{event:?} is no event"),
                    Some("[DONE]") => return Ok(tokens),
                    Some(data) => tokens.extend(chunk_ids(&serde_json::from_str(data)?)?),
                }
            }
        }
        bail!("the stream of {} ended without [DONE]", ask.id)
    }
}

async fn grpc(mut client: InferenceClient<Channel>, ask: &Ask, timeout: Option<Duration>) -> anyhow::Result<Vec<u32>> {
    let mut request = tonic::Request::new(ask.grpc());
    if let Some(timeout) = timeout {
        request.set_timeout(timeout);
    }
    let status = |status: tonic::Status| {
        let has_retry_hint = status.metadata().contains_key("retry-after-ms");
        let error = baton_proto::convert::status::to_error(&status);
        Refused { code: error.kind.name().into(), message: error.message, has_retry_hint }
    };
    let mut stream = client.generate(request).await.map_err(status)?.into_inner();
    let mut tokens = Vec::new();
    while let Some(response) = stream.message().await.map_err(status)? {
        tokens.extend(response.token_ids);
    }
    Ok(tokens)
}

fn refused(error: &Value, has_retry_hint: bool) -> Refused {
    let code = error["code"].as_str().or(error["type"].as_str()).unwrap_or("no error object").to_owned();
    Refused { code, message: error["message"].as_str().unwrap_or_default().to_owned(), has_retry_hint }
}

fn token_ids(body: &Value) -> anyhow::Result<Vec<u32>> {
    Ok(serde_json::from_value(body["choices"][0]["token_ids"].clone())?)
}

fn chunk_ids(chunk: &Value) -> anyhow::Result<Vec<u32>> {
    if !chunk["error"].is_null() {
        return Err(refused(&chunk["error"], false).into());
    }
    let has_ids = chunk["choices"][0]["token_ids"].is_array();
    if has_ids { token_ids(chunk) } else { Ok(Vec::new()) }
}
