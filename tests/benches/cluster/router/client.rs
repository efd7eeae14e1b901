//! Who asks the router: prompts of a known length, and answers that are checked.

use super::{MODEL, Work};
use anyhow::{Context, ensure};
use baton_text::{Specials, Tokenizer};
use futures::stream::{StreamExt as _, TryStreamExt as _, iter};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use reqwest::Response;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Tokens that the default model's template puts around one message.
const TEMPLATE_TOKENS: usize = 31;
/// How far from the wanted length a prompt may be.
const PROMPT_SHARE: f64 = 0.03;
/// Places that are tried for one text.
const DRAWS_MAX: usize = 100;

/// The project's documents, one behind the other.
pub(super) fn prose() -> anyhow::Result<String> {
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(docs)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    Ok(files.iter().map(std::fs::read_to_string).collect::<Result<Vec<_>, _>>()?.concat())
}

/// Texts of a wanted length, from anywhere in the prose.
pub(super) struct Prompts<'a> {
    tokenizer: &'a Tokenizer,
    prose: String,
    random: StdRng,
}

impl<'a> Prompts<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, prose: String) -> Self {
        Self { tokenizer, prose, random: StdRng::seed_from_u64(21) }
    }

    /// So many messages that come to so many tokens with the template around them.
    pub(super) fn take(&mut self, count: usize, tokens: usize) -> anyhow::Result<Vec<String>> {
        let wanted = tokens.saturating_sub(TEMPLATE_TOKENS);
        (0..count).map(|_| self.one(wanted)).collect()
    }

    fn one(&mut self, wanted: usize) -> anyhow::Result<String> {
        // Few tokens have more characters; rules and tables are passed over.
        let longest = 8 * wanted;
        for _ in 0..DRAWS_MAX {
            let from = self.prose.floor_char_boundary(self.random.random_range(0..self.prose.len() - longest));
            let mut text = &self.prose[from..self.prose.floor_char_boundary(from + longest)];
            loop {
                let off = self.tokenizer.encode(text, Specials::AsText)?.len() as f64 / wanted as f64 - 1.0;
                if off.abs() <= PROMPT_SHARE {
                    return Ok(text.to_owned());
                }
                if off < 0.0 {
                    break;
                }
                // From above, so that it seldom becomes too short.
                let less = (text.len() as f64 / (1.0 + off) * (1.0 + PROMPT_SHARE / 2.0)) as usize;
                text = &text[..text.floor_char_boundary(less.min(text.len() - 1))];
            }
        }
        anyhow::bail!("no text of {wanted} tokens in {DRAWS_MAX} places of the documents")
    }
}

/// Asks one router.
pub(super) struct Client {
    http: reqwest::Client,
    url: String,
}

impl Client {
    pub(super) fn new(router: SocketAddr) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().pool_max_idle_per_host(usize::MAX).build()?;
        Ok(Self { http, url: format!("http://{router}/v1/chat/completions") })
    }

    /// Asks all of these, and reads their answers to the end; looks at all that they say where they are `checked`.
    pub(super) async fn ask_all(&self, prompts: &[String], work: Work, checked: bool) -> anyhow::Result<()> {
        let asks = iter(prompts).map(|prompt| async move {
            let answer = self.ask(prompt, work, checked);
            tokio::time::timeout(ANSWER_MAX, answer).await.context("no answer")?
        });
        asks.buffer_unordered(work.clients).try_collect().await
    }

    async fn ask(&self, prompt: &str, work: Work, checked: bool) -> anyhow::Result<()> {
        let mut answer = self.begin(prompt, work, checked).await?;
        let mut body = Vec::new();
        while let Some(part) = answer.chunk().await? {
            body.extend_from_slice(&part);
        }
        ensure!(body.ends_with(b"data: [DONE]\n\n"), "no end: {}", String::from_utf8_lossy(&body));
        if !checked {
            return Ok(());
        }
        let body = String::from_utf8(body)?;
        let chunks = body.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        let chunks: Vec<Value> = chunks.map(serde_json::from_str).collect::<Result<_, _>>()?;
        let usage = &chunks.last().context("no chunk")?["usage"];
        ensure!(
            usage["completion_tokens"] == work.answer_tokens,
            "{usage} where {} were asked for",
            work.answer_tokens
        );
        let prompt_tokens = usage["prompt_tokens"].as_u64().context("no usage")? as f64;
        let off = (prompt_tokens / work.prompt_tokens as f64 - 1.0).abs();
        ensure!(off <= 2.0 * PROMPT_SHARE, "{prompt_tokens} tokens in, {} were meant", work.prompt_tokens);
        Ok(())
    }

    /// Asks, and waits for the first part of the answer, which stays open.
    pub(super) async fn open(&self, prompt: &str, work: Work) -> anyhow::Result<Response> {
        let mut answer = self.begin(prompt, work, false).await?;
        answer.chunk().await?.context("an empty answer")?;
        Ok(answer)
    }

    async fn begin(&self, prompt: &str, work: Work, usage: bool) -> anyhow::Result<Response> {
        let mut body = json!({
            "model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": work.answer_tokens,
            "temperature": 0, "ignore_eos": true, "stream": true,
        });
        if work.remote {
            body["prefill_policy"] = "remote".into();
        }
        if usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        let response = self.http.post(&self.url).json(&body).send().await?;
        let status = response.status();
        if !status.is_success() {
            anyhow::bail!("{status}: {}", response.text().await?);
        }
        Ok(response)
    }
}
