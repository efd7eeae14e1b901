//! Prompts to token ids: pure compute, so off the I/O threads, a few at a time, and within the request's deadline.

use crate::admission::Place;
use crate::models::ModelText;
use crate::request::{Prompt, Segment};
use baton_types::{ErrorKind, RequestError, TokenId};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

/// Bounds how many prompts are tokenized at once: each may take a hundred times its text in memory.
#[derive(Debug)]
pub(crate) struct Tokenizing(Arc<Semaphore>);

impl Tokenizing {
    /// As many at once as there are cores.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from))))
    }

    /// The prompt's tokens. `places` come back with them; where the request ends before, the tokenizer keeps them until it is done, so
    /// that requests that were given up do not make room for more work of the same kind.
    pub(super) async fn run(
        &self,
        prompt: &Arc<Prompt>,
        text: Option<Arc<ModelText>>,
        tokens_max: u64,
        deadline: Instant,
        places: Vec<Place>,
    ) -> Result<(Vec<TokenId>, Vec<Place>), RequestError> {
        let Some(text) = text else { return Ok((without_text(prompt)?, places)) };
        let late =
            |_| RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before the prompt was tokenized");
        let permit = timeout_at(deadline.into(), self.0.clone().acquire_owned()).await.map_err(late)?;
        let prompt = prompt.clone();
        let encode = move || {
            let _permit = permit;
            let tokens = match &*prompt {
                Prompt::Chat { messages, template_kwargs } => text.encode_chat(messages, template_kwargs, tokens_max),
                Prompt::Segments(segments) => text.encode_segments(segments, tokens_max),
            };
            (tokens, places)
        };
        let joined = timeout_at(deadline.into(), tokio::task::spawn_blocking(encode)).await.map_err(late)?;
        let failed = |_| RequestError::new(ErrorKind::Internal, "the tokenizer failed on this prompt");
        let (tokens, places) = joined.map_err(failed)?;
        Ok((tokens?, places))
    }
}

fn without_text(prompt: &Prompt) -> Result<Vec<TokenId>, RequestError> {
    let refuse = |param| Err(RequestError::invalid(param, "this model has no tokenizer; send token ids"));
    match prompt {
        Prompt::Chat { .. } => refuse("messages"),
        Prompt::Segments(segments) => segments.iter().try_fold(Vec::new(), |mut tokens, segment| match segment {
            Segment::Text(_) => refuse("prompt"),
            Segment::Tokens(ids) => {
                tokens.extend_from_slice(ids);
                Ok(tokens)
            }
        }),
    }
}
