//! Prompts to token ids: pure compute, so off the I/O threads, a few at a time, and within the request's deadline.

use crate::admission::Place;
use crate::models::ModelText;
use crate::request::{Prompt, Segment};
use baton_types::{ErrorKind, RequestError, TokenId};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

/// Prompts ([`Prompt::bytes`]) that are tokenized at once: they may take fifty times that meanwhile. A longer one is tokenized alone.
const PROMPTS_BYTES_MAX: u32 = 4 << 20;

/// Bounds how much is tokenized at once, by how many threads.
#[derive(Debug)]
pub(crate) struct Tokenizing {
    room: Arc<Semaphore>,
    /// No prompt takes less of it: as many at once as there are cores.
    least: u32,
}

impl Tokenizing {
    /// On all cores.
    pub(crate) fn new() -> Self {
        Self::on(std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32))
    }

    fn on(cores: u32) -> Self {
        let room = Arc::new(Semaphore::new(PROMPTS_BYTES_MAX as usize));
        Self { room, least: (PROMPTS_BYTES_MAX / cores).max(1) }
    }

    fn takes(&self, prompt: &Prompt) -> u32 {
        u32::try_from(prompt.bytes()).unwrap_or(u32::MAX).clamp(self.least, PROMPTS_BYTES_MAX)
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
        let permit = timeout_at(deadline.into(), self.room.clone().acquire_many_owned(self.takes(prompt)))
            .await
            .map_err(late)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_prompts_and_so_much_of_them_at_once() {
        let prompt = |bytes: usize| Prompt::Segments(vec![Segment::Text("x".repeat(bytes))]);
        let tokenizing = Tokenizing::on(4);
        let takes = |bytes| tokenizing.takes(&prompt(bytes));
        assert_eq!((takes(1), takes(16 << 20)), (PROMPTS_BYTES_MAX / 4, PROMPTS_BYTES_MAX));
        assert!(takes(1 << 20) > PROMPTS_BYTES_MAX / 2, "no two of a MiB");
    }
}
