//! The OpenAI API as used by a program without a client library.

use reqwest::header::HeaderMap;
use serde_json::Value;

/// Sends requests to one cluster.
pub struct Api {
    client: reqwest::Client,
    base: String,
}

/// A complete answer.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    pub headers: HeaderMap,
    /// Its body; a string if it is not JSON.
    pub body: Value,
}

impl Answer {
    /// A header's text; empty if it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }

    /// Text of the only choice, of a chat or a completion.
    pub fn text(&self) -> &str {
        let choice = &self.body["choices"][0];
        choice["message"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default()
    }

    /// Token ids of the only choice, if `return_token_ids` requested them.
    pub fn tokens(&self) -> Vec<u64> {
        self.body["choices"][0]["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
    }
}

impl Api {
    /// `base` is e.g. `http://127.0.0.1:8000/v1`.
    pub fn new(base: impl Into<String>) -> Self {
        Self { client: reqwest::Client::new(), base: base.into() }
    }

    /// Posts JSON.
    pub async fn post(&self, path: &str, body: Value) -> anyhow::Result<Answer> {
        self.post_with(path, body, &[]).await
    }

    /// Posts JSON with further headers.
    pub async fn post_with(&self, path: &str, body: Value, headers: &[(&str, &str)]) -> anyhow::Result<Answer> {
        answer(self.open(path, body, headers).await?).await
    }

    /// Posts JSON. The caller reads the body, chunk by chunk.
    pub async fn open(&self, path: &str, body: Value, headers: &[(&str, &str)]) -> anyhow::Result<reqwest::Response> {
        let request = self.client.post(format!("{}/{path}", self.base)).json(&body);
        Ok(headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).send().await?)
    }

    /// Gets `path` below the base.
    pub async fn get(&self, path: &str) -> anyhow::Result<Answer> {
        answer(self.client.get(format!("{}/{path}", self.base)).send().await?).await
    }
}

async fn answer(response: reqwest::Response) -> anyhow::Result<Answer> {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let text = response.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Ok(Answer { status, headers, body })
}
