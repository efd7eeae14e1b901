//! `Inference/Generate`: one prompt, and its streamed answer.

use crate::router::RouterChannel;
use baton_proto::v1::{self, inference_client::InferenceClient, segment::Kind};
use std::time::Duration;
use tonic::{Request, Status, Streaming};

/// The text to continue or the chat to answer.
pub(crate) enum Prompt {
    Chat(Vec<Message>),
    Text(String),
    Tokens(Vec<u32>),
}

/// A message of a chat.
#[derive(Clone)]
pub(crate) struct Message {
    /// `system`, `user` or `assistant`.
    pub(crate) role: &'static str,
    pub(crate) content: String,
}

/// How the answer is generated. Absent values take the model's default.
#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) temperature: f32,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<u32>,
    pub(crate) seed: Option<u64>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) stop: Vec<String>,
    /// A prefill worker runs the whole prompt, even if parts of it are cached on any worker.
    pub(crate) remote_uncached: bool,
}

pub(crate) struct Question {
    /// Served name; may be empty if the cluster serves one model.
    pub(crate) model: String,
    pub(crate) prompt: Prompt,
    pub(crate) options: Options,
}

impl Question {
    /// Sends it. The router ends the request after `timeout`.
    pub(crate) async fn ask(self, channel: RouterChannel, timeout: Duration) -> Result<Answer, Status> {
        let mut request = Request::new(self.into_proto());
        request.set_timeout(timeout);
        Ok(Answer(InferenceClient::new(channel).generate(request).await?.into_inner()))
    }

    fn into_proto(self) -> v1::GenerateRequest {
        let Self { model, prompt, options } = self;
        let message = |Message { role, content }| {
            Kind::Message(v1::ChatMessage { role: role.into(), content, name: String::new() })
        };
        let kinds = match prompt {
            Prompt::Chat(messages) => messages.into_iter().map(message).collect(),
            Prompt::Text(text) => vec![Kind::Text(text)],
            Prompt::Tokens(ids) => vec![Kind::Tokens(v1::TokenIds { ids })],
        };
        let sampling = v1::Sampling {
            temperature: Some(options.temperature),
            top_p: options.top_p,
            top_k: options.top_k,
            seed: options.seed,
            max_tokens: options.max_tokens,
            ignore_eos: options.ignore_eos,
            ..Default::default()
        };
        let policy = if options.remote_uncached { v1::PrefillPolicy::Remote } else { v1::PrefillPolicy::Unspecified };
        v1::GenerateRequest {
            model,
            prompt: kinds.into_iter().map(|kind| v1::Segment { kind: Some(kind) }).collect(),
            sampling: Some(sampling),
            stop: options.stop,
            prefill_policy: policy.into(),
            // Cached KV would not be transferred.
            cache: options.remote_uncached.then(|| v1::CacheOptions { off: true, ..Default::default() }),
            ..Default::default()
        }
    }
}

/// A streamed answer; dropping it cancels the request.
pub(crate) struct Answer(Streaming<v1::GenerateResponse>);

/// One message of an answer.
pub(crate) struct Part {
    /// May be empty: a character or a stop string may be incomplete.
    pub(crate) text: String,
    pub(crate) tokens: usize,
    /// Comes with the last message.
    pub(crate) last: Option<Last>,
}

/// Results reported at the end of an answer. Values that were not measured are absent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Last {
    pub(crate) request_id: String,
    /// It ended because `max_tokens` were generated.
    pub(crate) is_full_length: bool,
    pub(crate) prompt_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) queue_us: Option<u64>,
    pub(crate) prefill_us: Option<u64>,
    pub(crate) transfer_us: Option<u64>,
    /// The part of the transfer that did not overlap with compute.
    pub(crate) exposed_us: Option<u64>,
    pub(crate) transfer_bytes: Option<u64>,
    /// Numerics classes of the tokens, in order, if the answer's tokens come from more than one class.
    pub(crate) crossed_classes: Vec<String>,
}

impl Answer {
    /// The next message; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Part>, Status> {
        Ok(self.0.message().await?.map(part))
    }
}

fn part(message: v1::GenerateResponse) -> Part {
    let is_full_length = message.finish_reason() == v1::FinishReason::Length;
    let timings = message.timings.unwrap_or_default();
    let last = message.usage.map(|usage| Last {
        request_id: message.request_id,
        is_full_length,
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        completion_tokens: usage.completion_tokens,
        queue_us: timings.queue_us,
        prefill_us: timings.prefill_us,
        transfer_us: timings.transfer_us,
        exposed_us: timings.exposed_us,
        transfer_bytes: timings.transfer_bytes,
        crossed_classes: message.crossed_classes,
    });
    Part { text: message.text, tokens: message.token_ids.len(), last }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_past_all_caches_says_so() {
        let request = |options: Options| {
            let messages = [("system", "be brief"), ("user", "hello")];
            let message = |(role, content): (&'static str, &str)| Message { role, content: content.into() };
            let prompt = Prompt::Chat(messages.map(message).into());
            Question { model: String::new(), prompt, options }.into_proto()
        };
        let plain = request(Options::default());
        assert_eq!(plain.prefill_policy(), v1::PrefillPolicy::Unspecified);
        assert!(plain.cache.is_none());
        let roles = plain.prompt.iter().map(|segment| match &segment.kind {
            Some(Kind::Message(message)) => message.role.as_str(),
            _ => "",
        });
        assert_eq!(roles.collect::<Vec<_>>(), ["system", "user"]);
        let remote = request(Options { remote_uncached: true, ..Options::default() });
        assert_eq!(remote.prefill_policy(), v1::PrefillPolicy::Remote);
        assert!(remote.cache.is_some_and(|cache| cache.off));
    }

    #[test]
    fn usage_comes_with_the_last_message_alone() {
        let first = v1::GenerateResponse { text: "a".into(), token_ids: vec![1, 2], ..Default::default() };
        let Part { text, tokens, last } = part(first.clone());
        assert_eq!((&*text, tokens, last.is_none()), ("a", 2, true));
        let last = part(v1::GenerateResponse {
            finish_reason: v1::FinishReason::Length.into(),
            usage: Some(v1::Usage { prompt_tokens: 3, cached_tokens: 2, completion_tokens: 1, ..Default::default() }),
            timings: Some(v1::Timings { transfer_us: Some(5), transfer_bytes: Some(6), ..Default::default() }),
            ..first
        })
        .last
        .expect("usage");
        assert!(last.is_full_length);
        assert_eq!((last.prompt_tokens, last.cached_tokens, last.completion_tokens), (3, 2, 1));
        assert_eq!((last.queue_us, last.transfer_us, last.transfer_bytes), (None, Some(5), Some(6)));
    }
}
