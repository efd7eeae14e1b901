//! Prompts to token ids: pure compute, so it runs off the I/O threads, with bounded concurrency and memory, and within
//! the request's deadline.

use super::grammars::GrammarChecks;
use super::memory::{Memory, Share};
use super::prepare::of_prompt;
use super::turns::{Turn, Turns};
use crate::admission::Slot;
use crate::models::{ModelText, PromptBounds};
use crate::request::{AskedGrammar, BadWords, Prompt, Segment};
use crate::workers::ServedModel;
use baton_node::runtime::blocking;
use baton_types::{ErrorKind, RequestError, Runtime, TenantLabel, TokenId};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Text that a chat is assumed to become at least: what templates add to a short one is mostly less.
const CHAT_BYTES_MIN: usize = 16 << 10;

/// Bounds how many prompts are tokenized at once, and the memory that they take. Tenants take turns.
#[derive(Debug)]
pub(crate) struct Tokenizing {
    /// Of short prompts, which do not wait for long ones of their tenant.
    short: Turns,
    /// Of long ones, of the same threads.
    long: Turns,
    /// Threads that long ones may take: one is left for short ones.
    for_long: Arc<Semaphore>,
    /// They have turns of their own: some take long, and prompts do not wait for them.
    grammars: GrammarChecks,
    memory: Memory,
}

/// What is done before a request is placed: its texts to tokens, and a check of its grammar.
#[derive(Debug)]
pub(super) struct Work {
    /// Whose turn it takes.
    pub(super) tenant: TenantLabel,
    pub(super) prompt: Prompt,
    pub(super) grammar: Option<AskedGrammar>,
    pub(super) bad_words: BadWords,
    /// Whether only the end of a prompt that is too long is kept.
    pub(super) truncates: bool,
}

/// What became of [`Work`].
#[derive(Debug, Default)]
pub(super) struct Tokenized {
    /// Of each prompt.
    pub(super) prompts: Vec<Vec<TokenId>>,
    pub(super) bad_words: Vec<Vec<TokenId>>,
    /// As they were given.
    pub(super) slots: Vec<Slot>,
}

enum Encoded {
    /// Of each prompt.
    Tokens(Vec<Vec<TokenId>>),
    /// The template made more text than there is memory for in this turn: this many bytes are needed.
    Takes(u64),
}

impl Tokenizing {
    /// As many at once as there are cores, and two on one core, with `memory_max` bytes for all of them.
    pub(crate) fn new(memory_max: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::on(cores.max(2), memory_max)
    }

    fn on(threads: usize, memory_max: u64) -> Self {
        let all = Arc::new(Semaphore::new(threads));
        let turns = || Turns::of(threads, all.clone());
        let for_long = Arc::new(Semaphore::new(threads - 1));
        let grammars = GrammarChecks::new(threads.div_ceil(2));
        Self { short: turns(), long: turns(), for_long, grammars, memory: Memory::new(memory_max) }
    }

    /// A thread, and memory. It waits for the memory first, so it does not hold a thread while it waits.
    async fn turn(&self, tenant: TenantLabel, bytes: u64) -> (Share, Option<OwnedSemaphorePermit>, Turn) {
        let is_long = self.memory.is_long(bytes);
        let next = if is_long { &self.long } else { &self.short }.next(tenant).await;
        let of_long = if is_long { self.for_long.clone().acquire_owned().await.ok() } else { None };
        let share = self.memory.share(bytes).await;
        (share, of_long, next.turn().await)
    }

    /// The tokens of all texts, and `slots` again; refuses a grammar that does not compile. If the request ends first, the
    /// tokenizer keeps the slots until it is done, so cancelled requests do not admit more work of the same kind.
    pub(super) async fn run(
        &self,
        runtime: &dyn Runtime,
        work: Work,
        model: &ServedModel,
        deadline: Instant,
        mut slots: Vec<Slot>,
    ) -> Result<Tokenized, RequestError> {
        let Work { tenant, mut prompt, grammar, bad_words, truncates } = work;
        let Some(text) = &model.text else {
            let bad_words = bad_words.tokens(None)?;
            return Ok(Tokenized { prompts: without_text(&prompt, grammar.as_ref())?, bad_words, slots });
        };
        let late =
            || RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before the prompt was tokenized");
        let failed = || RequestError::new(ErrorKind::Internal, "the tokenizer failed on this prompt");
        let bounds = PromptBounds { tokens_max: model.tokens_max, truncates, memory_max: self.memory.most() };
        if let Some(asked) = grammar {
            slots = self.grammars.check(runtime, tenant, asked, deadline, slots).await?;
        }
        let (mut takes, mut bad_words) = (text.takes(text_bytes(&prompt) + bad_words.bytes()), bad_words);
        loop {
            let turn = runtime.until(deadline, self.turn(tenant, takes)).await.ok_or_else(late)?;
            let text = text.clone();
            let work = move || {
                let _turn = turn;
                let encoded = encode(&text, &prompt, bounds, takes).and_then(|encoded| {
                    let more = matches!(encoded, Encoded::Takes(_));
                    let words = if more { Vec::new() } else { bad_words.tokens(Some(&text))? };
                    Ok((encoded, words))
                });
                (encoded, (prompt, bad_words, slots))
            };
            let encoded = runtime.until(deadline, blocking(runtime, work)).await.ok_or_else(late)?;
            let (encoded, kept) = encoded.ok_or_else(failed)?;
            match encoded? {
                (Encoded::Tokens(prompts), bad_words) => return Ok(Tokenized { prompts, bad_words, slots: kept.2 }),
                // Rendered again: a turn that waited for more memory could wait for others that do so.
                (Encoded::Takes(bytes), _) => (takes, (prompt, bad_words, slots)) = (bytes, kept),
            }
        }
    }
}

/// The tokens, if they take no more than `share` bytes of memory.
fn encode(text: &ModelText, prompt: &Prompt, bounds: PromptBounds, share: u64) -> Result<Encoded, RequestError> {
    match prompt {
        Prompt::Segments(segments) => {
            text.encode_segments(segments, bounds).map(|tokens| Encoded::Tokens(vec![tokens]))
        }
        Prompt::List(prompts) => {
            let encode = |(at, prompt)| {
                let tokens = text.encode_segments(std::slice::from_ref(prompt), bounds);
                tokens.map_err(|error| of_prompt(at, prompts.len() as u32, error))
            };
            prompts.iter().enumerate().map(encode).collect::<Result<_, _>>().map(Encoded::Tokens)
        }
        Prompt::Chat { messages, tools, template_kwargs, ending } => {
            let rendered = text.render(messages, tools.as_ref(), template_kwargs, *ending, bounds)?;
            let takes = text.takes(rendered.text().len());
            if takes > share {
                Ok(Encoded::Takes(takes))
            } else {
                text.encode(&rendered).map(|tokens| Encoded::Tokens(vec![tokens]))
            }
        }
    }
}

/// Bytes of text to tokenize, for a chat with those of its intermediate forms; token ids need no tokenization.
fn text_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Chat { .. } => usize::try_from(prompt.bytes()).unwrap_or(usize::MAX).max(CHAT_BYTES_MIN),
        Prompt::Segments(segments) | Prompt::List(segments) => {
            segments.iter().map(|segment| if let Segment::Text(text) = segment { text.len() } else { 0 }).sum()
        }
    }
}

fn without_text(prompt: &Prompt, grammar: Option<&AskedGrammar>) -> Result<Vec<Vec<TokenId>>, RequestError> {
    if let Some(AskedGrammar { param, .. }) = grammar {
        return Err(RequestError::invalid(*param, "this model has no tokenizer, so its answers can follow no grammar"));
    }
    let refuse = |param| RequestError::invalid(param, "this model has no tokenizer; send token ids");
    let ids = |segment| match segment {
        &Segment::Text(_) => Err(refuse("prompt")),
        Segment::Tokens(ids) => Ok(&ids[..]),
    };
    match prompt {
        Prompt::Chat { .. } => Err(refuse("messages")),
        Prompt::Segments(segments) => Ok(vec![segments.iter().map(ids).collect::<Result<Vec<_>, _>>()?.concat()]),
        Prompt::List(prompts) => prompts.iter().map(|prompt| ids(prompt).map(<[TokenId]>::to_vec)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use crate::testing::text::byte_bundle;
    use crate::workers::ModelKey;
    use baton_node::runtime::TokioRuntime;
    use baton_text::{Ending, Message, Role, bundle};
    use futures::FutureExt as _;
    use std::time::Duration;

    const MIB: u64 = 1 << 20;
    const A: TenantLabel = TenantLabel(1);
    const B: TenantLabel = TenantLabel(2);

    #[tokio::test]
    async fn a_long_prompt_waits_for_long_ones_and_keeps_no_other_waiting() {
        let tokenizing = Tokenizing::on(3, 384 * MIB);
        let now = |bytes: u64| tokenizing.turn(A, bytes).now_or_never();
        let longest = now(1000 * MIB).unwrap();
        let mut waiting: Vec<_> = (0..9).map(|_| Box::pin(tokenizing.turn(A, 25 * MIB))).collect();
        assert!(waiting.iter_mut().all(|long| long.now_or_never().is_none()), "it runs alone among long ones");
        let short = [now(24 * MIB), now(0)];
        assert!(short.iter().all(Option::is_some));
        assert!(now(0).is_none(), "as many as there are threads");
        drop((longest, short, waiting));
        let long = [now(60 * MIB), now(60 * MIB)];
        assert!(long.iter().all(Option::is_some));
        assert_eq!(text_bytes(&Prompt::Segments(vec![Segment::Tokens(vec![1; 9])])), 0);
        let chat = |content: String| Prompt::Chat {
            messages: vec![Message::text(Role::User, content)],
            tools: None,
            template_kwargs: serde_json::Map::new(),
            ending: Ending::Answer,
        };
        assert_eq!(text_bytes(&chat("hi".into())), CHAT_BYTES_MIN);
        assert!(text_bytes(&chat("x".repeat(1 << 20))) >= 1 << 20);
    }

    /// Two long prompts that fit into the memory together would take seconds of all threads.
    #[tokio::test]
    async fn long_prompts_leave_a_thread_to_short_ones() {
        for threads in [2, 3] {
            let tokenizing = Tokenizing::on(threads, 384 * MIB);
            let long = [A, B, A].map(|tenant| tokenizing.turn(tenant, 30 * MIB).now_or_never());
            assert_eq!(long.iter().flatten().count(), threads - 1);
            let short = tokenizing.turn(B, MIB).now_or_never();
            assert!(short.is_some(), "{threads} threads");
            drop(long);
            let mut others: Vec<_> = (0..threads).map(|_| Box::pin(tokenizing.turn(B, 30 * MIB))).collect();
            let running: Vec<_> = others.iter_mut().filter_map(|other| other.now_or_never()).collect();
            assert_eq!(running.len(), threads - 1);
        }
    }

    #[tokio::test]
    async fn however_many_long_prompts_of_one_tenant_wait_another_waits_for_few() {
        let tokenizing = Tokenizing::on(2, 384 * MIB);
        let long = || tokenizing.turn(A, 200 * MIB);
        let first = long().now_or_never().unwrap();
        let mut others: Vec<_> = (0..9).map(|_| Box::pin(long())).collect();
        assert!(others.iter_mut().all(|other| other.now_or_never().is_none()));
        let mut of_b = Box::pin(tokenizing.turn(B, 200 * MIB));
        assert!((&mut of_b).now_or_never().is_none());
        drop(first);
        let second = (&mut others[0]).now_or_never().unwrap();
        assert!((&mut of_b).now_or_never().is_none() && (&mut others[1]).now_or_never().is_none());
        drop(second);
        assert!((&mut others[1]).now_or_never().is_none(), "who came later comes before");
        assert!((&mut of_b).now_or_never().is_some());
    }

    #[tokio::test]
    async fn prompts_of_all_threads_together_take_what_is_theirs() {
        let tokenizing = Tokenizing::on(64, 384 * MIB);
        let text = ModelText::load(&bundle::decode(&byte_bundle("")).unwrap()).unwrap();
        let bytes = 512 << 10;
        let takes = text.takes(text_bytes(&Prompt::Segments(vec![Segment::Text("x".repeat(bytes))])));
        assert_eq!(takes, 40 * bytes as u64);
        let at_once = (0..64).map_while(|_| tokenizing.turn(A, takes).now_or_never()).collect::<Vec<_>>().len();
        assert_eq!(at_once, 384 / 20);
    }

    #[tokio::test]
    async fn a_template_that_makes_much_text_waits_for_its_memory() {
        let before = "x".repeat(10 * CHAT_BYTES_MIN);
        let text = ModelText::load(&bundle::decode(&byte_bundle(&before)).unwrap()).unwrap();
        let chat = || Prompt::Chat {
            ending: Ending::Answer,
            tools: None,
            messages: vec![Message::text(Role::User, "hi")],
            template_kwargs: serde_json::Map::new(),
        };
        let (len, takes) = (before.len() + "[user]hi".len() + 1, text.takes(before.len() + "[user]hi<|end|>".len()));
        let bounds = PromptBounds { tokens_max: u64::MAX, truncates: false, memory_max: u64::MAX };
        let at = |share| match encode(&text, &chat(), bounds, share).unwrap() {
            Encoded::Tokens(tokens) => Ok(tokens[0].len()),
            Encoded::Takes(bytes) => Err(bytes),
        };
        assert_eq!((at(takes - 1), at(takes)), (Err(takes), Ok(len)));
        let (card, text) = (record(baton_types::Role::Decode, "d").card, Some(Arc::new(text)));
        let (adapters, since) = (Default::default(), Instant::now());
        let model = ServedModel { key: ModelKey::from(&card), card, text, tokens_max: u64::MAX, adapters, since };
        let (tokenizing, runtime) = (Tokenizing::new(384 * MIB), TokioRuntime::current());
        let deadline = Instant::now() + Duration::from_secs(60);
        let bad_words = BadWords::try_new(vec!["no".into()]).unwrap();
        let work = Work { tenant: A, prompt: chat(), grammar: None, bad_words, truncates: false };
        let tokenized = tokenizing.run(&runtime, work, &model, deadline, Vec::new()).await.unwrap();
        assert_eq!((tokenized.prompts.len(), tokenized.prompts[0].len(), tokenized.slots.len()), (1, len, 0));
        assert_eq!(tokenized.bad_words.len(), 2, "with a space before it, and without");
    }
}
