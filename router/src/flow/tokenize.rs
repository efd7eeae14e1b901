//! Prompts to token ids: pure compute, so it runs off the I/O threads, with bounded concurrency, and within the
//! request's deadline.

use crate::admission::Slot;
use crate::models::PromptBounds;
use crate::request::{Prompt, Segment};
use crate::workers::ServedModel;
use baton_node::runtime::blocking;
use baton_types::{ErrorKind, RequestError, Runtime, TokenId};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Tokenizing a prompt may take a hundred times the memory of its text. A prompt with more text than this counts as
/// long.
const LONG_BYTES: usize = 512 << 10;
/// Total text of long prompts tokenized at once. A prompt with more text is tokenized alone; short prompts do not wait
/// for long ones.
const LONG_BYTES_MAX: u32 = 2 << 20;

/// Bounds how many prompts are tokenized at once, the total text of long ones, and the memory for one.
#[derive(Debug)]
pub(crate) struct Tokenizing {
    threads: Arc<Semaphore>,
    long: Arc<Semaphore>,
    memory_max: u64,
}

impl Tokenizing {
    /// As many at once as there are cores. `memory_max` as in [`PromptBounds`].
    pub(crate) fn new(memory_max: u64) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let long = Arc::new(Semaphore::new(LONG_BYTES_MAX as usize));
        Self { threads: Arc::new(Semaphore::new(threads)), long, memory_max }
    }

    /// A thread, and for a long prompt its share of the text budget. It waits for the budget first, so it does not hold
    /// a thread while it waits.
    async fn turn(&self, text_bytes: usize) -> Result<[Option<OwnedSemaphorePermit>; 2], AcquireError> {
        let text = u32::try_from(text_bytes).unwrap_or(u32::MAX).min(LONG_BYTES_MAX);
        let room = if text_bytes > LONG_BYTES { Some(self.long.clone().acquire_many_owned(text).await?) } else { None };
        Ok([room, Some(self.threads.clone().acquire_owned().await?)])
    }

    /// The prompt's tokens, and `slots` again. If the request ends first, the tokenizer keeps the slots until it is
    /// done, so cancelled requests do not admit more work of the same kind.
    pub(super) async fn run(
        &self,
        runtime: &dyn Runtime,
        prompt: Prompt,
        model: &ServedModel,
        deadline: Instant,
        slots: Vec<Slot>,
    ) -> Result<(Vec<TokenId>, Vec<Slot>), RequestError> {
        let Some(text) = model.text.clone() else { return Ok((without_text(&prompt)?, slots)) };
        let late =
            || RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before the prompt was tokenized");
        let failed = || RequestError::new(ErrorKind::Internal, "the tokenizer failed on this prompt");
        let turn = runtime.until(deadline, self.turn(text_bytes(&prompt))).await.ok_or_else(late)?;
        let bounds = PromptBounds { tokens_max: model.tokens_max, memory_max: self.memory_max };
        let encode = move || {
            let _turn = turn;
            let tokens = match &prompt {
                Prompt::Chat { messages, template_kwargs } => text.encode_chat(messages, template_kwargs, bounds),
                Prompt::Segments(segments) => text.encode_segments(segments, bounds),
            };
            (tokens, slots)
        };
        let encoded = runtime.until(deadline, blocking(runtime, encode)).await.ok_or_else(late)?;
        let (tokens, slots) = encoded.ok_or_else(failed)?;
        Ok((tokens?, slots))
    }
}

/// Bytes of text to tokenize; token ids need no tokenization.
fn text_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Chat { .. } => usize::try_from(prompt.bytes()).unwrap_or(usize::MAX),
        Prompt::Segments(segments) => {
            segments.iter().map(|segment| if let Segment::Text(text) = segment { text.len() } else { 0 }).sum()
        }
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
    use futures::FutureExt as _;

    #[tokio::test]
    async fn a_long_prompt_waits_for_long_ones_and_keeps_no_other_waiting() {
        let threads = Arc::new(Semaphore::new(3));
        let tokenizing = Tokenizing { threads, ..Tokenizing::new(u64::MAX) };
        let text = |bytes| text_bytes(&Prompt::Segments(vec![Segment::Text("x".repeat(bytes))]));
        let now = |bytes: usize| tokenizing.turn(text(bytes)).now_or_never();
        let longest = now(16 << 20).unwrap().unwrap();
        assert!(now(LONG_BYTES + 1).is_none(), "it runs alone among long ones");
        let short = [now(LONG_BYTES), now(1)];
        assert!(short.iter().all(Option::is_some));
        assert!(now(1).is_none(), "as many as there are threads");
        drop((longest, short));
        let long = [now(1 << 20), now(1 << 20)];
        assert!(long.iter().all(Option::is_some) && now(LONG_BYTES + 1).is_none());
        assert_eq!(text_bytes(&Prompt::Segments(vec![Segment::Tokens(vec![1; 9])])), 0);
    }
}
