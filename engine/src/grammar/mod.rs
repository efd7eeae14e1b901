//! Sequences whose tokens follow a grammar. The engine knows no text: what a grammar allows comes from [`Grammars`], by token ids.
//!
//! A sequence takes no part in steps before its grammar has started, that is, before its first mask is there: compiling may take long, and
//! all rows of a step wait for each other.
//!
//! The allowed tokens of a position follow from the token before it. Where a device has one step ahead, a step is launched before that
//! token is known: its mask is a promise, which one of the `GrammarThreads` keeps while the device computes the row's logits.

mod starts;
mod threads;

pub(crate) use threads::GrammarThreads;

use crate::scheduler::SequenceKey;
use baton_kernels::sampling::TokenSet;
use baton_kernels::step::LateMask;
use baton_types::{ErrorKind, Grammar, RequestError, Share, TokenId};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A step waits this long for a mask. Grammars bound the work for one far below; a machine may be busy.
const MASK_WAIT_MAX: Duration = Duration::from_secs(10);

/// The grammars of one model.
pub trait Grammars: Send + Sync {
    /// Stack of a thread that starts and follows them: grammars may recurse along chains of rules. Only what is used is resident.
    fn stack_bytes(&self) -> usize;

    /// The state of an answer that has these tokens. May compile, so it may take long.
    ///
    /// # Errors
    /// If the grammar is refused, or does not allow the tokens.
    fn start(&self, grammar: &Grammar, answer: &[TokenId]) -> Result<Box<dyn GrammarState>, RequestError>;
}

/// Where one answer stands in its grammar: a function of the grammar and the answer's tokens.
pub trait GrammarState: Send {
    /// The tokens that may come next, never none.
    ///
    /// # Errors
    /// If that takes too much work.
    fn allowed(&mut self) -> Result<TokenSet, RequestError>;

    /// Takes the answer's next token.
    ///
    /// # Errors
    /// If it was not allowed.
    fn advance(&mut self, token: TokenId) -> Result<(), RequestError>;
}

/// The grammar of a sequence, and what it has of its answer.
pub(crate) struct Asked<'a> {
    pub(crate) grammar: Arc<Grammar>,
    /// Its generated tokens.
    pub(crate) answer: &'a [TokenId],
    /// Number of its tokens, prompt included.
    pub(crate) position: usize,
    pub(crate) priority: i32,
    pub(crate) share: Share,
    pub(crate) min_tokens: u32,
    /// All tokens but those that end the answer, of which none is drawn before it has `min_tokens`, if the grammar leaves another.
    pub(crate) without_ends: TokenSet,
}

/// The masks of one sequence. Dropping it takes back a start that still waits, and keeps all promises that steps may wait for.
pub(crate) struct SequenceGrammar {
    work: Arc<Work>,
    threads: Arc<GrammarThreads>,
    /// The place of its start among those of others.
    start: Option<SequenceKey>,
    /// Masks of the positions from `position` on; the first is known, or a thread works on it.
    masks: VecDeque<LateMask>,
    /// Number of tokens of the sequence.
    position: usize,
}

struct Work {
    state: Mutex<Option<Box<dyn GrammarState>>>,
    failed: OnceLock<RequestError>,
    /// Whether its first mask is there, and it has not failed.
    has_started: AtomicBool,
    /// All tokens but those that end the answer.
    without_ends: TokenSet,
    /// Before this position, none is drawn that ends the answer, if the grammar leaves another.
    ends_from: usize,
}

impl SequenceGrammar {
    /// Has a thread start the grammar, which calls `started` at the end, whether that failed or not.
    pub(crate) fn start(
        asked: Asked<'_>,
        threads: Arc<GrammarThreads>,
        started: impl FnOnce() + Send + 'static,
    ) -> Self {
        let Asked { grammar, answer, position, priority, share, min_tokens, without_ends } = asked;
        let ends_from = position - answer.len() + min_tokens as usize;
        let (state, failed, has_started) = (Mutex::default(), OnceLock::new(), AtomicBool::new(false));
        let work = Arc::new(Work { state, failed, has_started, without_ends, ends_from });
        let mut sequence = Self { work, threads, start: None, masks: VecDeque::new(), position };
        let (answer, grammars) = (answer.to_vec(), sequence.threads.grammars().clone());
        let fill = sequence.fill_next(move |state| {
            *state = Some(grammars.start(&grammar, &answer)?);
            Ok(())
        });
        let work = Arc::downgrade(&sequence.work);
        let job = move || {
            fill();
            if let Some(work) = work.upgrade() {
                work.has_started.store(work.failed.get().is_none(), Ordering::Release);
                started();
            }
        };
        sequence.start = Some(sequence.threads.start_one(priority, share, Box::new(job)));
        sequence
    }

    /// Whether its first mask is there: never, if it could not start.
    pub(crate) fn has_started(&self) -> bool {
        self.work.has_started.load(Ordering::Acquire)
    }

    /// The mask of a row that samples the token at `position`.
    pub(crate) fn mask(&mut self, position: usize) -> LateMask {
        let at = position - self.position;
        while self.masks.len() <= at {
            self.masks.push_back(LateMask::due(Instant::now() + MASK_WAIT_MAX));
        }
        self.masks[at].clone()
    }

    /// The answer has one more token, and goes on.
    pub(crate) fn advance(&mut self, token: TokenId) {
        self.position += 1;
        self.masks.pop_front();
        let fill = self.fill_next(move |state| state.as_mut().map_or(Ok(()), |state| state.advance(token)));
        if let Err(error) = self.threads.go_on(Box::new(fill)) {
            self.mask(self.position).fill(Arc::new(self.work.fail(error)));
        }
    }

    /// Why its last token cannot be trusted, if it cannot.
    pub(crate) fn failure(&self) -> Option<&RequestError> {
        self.work.failed.get()
    }

    /// The work of one mask: changes the state, and fills the mask of the next position.
    fn fill_next(
        &mut self,
        change: impl FnOnce(&mut Option<Box<dyn GrammarState>>) -> Result<(), RequestError> + Send + 'static,
    ) -> impl FnOnce() + Send + 'static {
        let (position, promised) = (self.position, self.mask(self.position));
        let work = Arc::downgrade(&self.work);
        move || {
            // Nobody waits for the mask of a sequence that has ended.
            let Some(work) = work.upgrade() else { return };
            let allowed = catch_unwind(AssertUnwindSafe(|| work.allowed(position, change)));
            // The panic hook has reported a panic.
            let allowed =
                allowed.unwrap_or_else(|_| work.fail(RequestError::new(ErrorKind::Internal, "its grammar panicked")));
            promised.fill(Arc::new(allowed));
        }
    }
}

impl Drop for SequenceGrammar {
    fn drop(&mut self) {
        self.start.into_iter().for_each(|place| self.threads.leave(place));
        // A launched step may wait for a row whose token nobody takes.
        let any = Arc::new(self.work.without_ends.clone());
        self.masks.iter().for_each(|mask| mask.fill(any.clone()));
    }
}

impl Work {
    /// The allowed tokens of `position`, after this change; any tokens after a failure, which is kept.
    fn allowed(
        &self,
        position: usize,
        change: impl FnOnce(&mut Option<Box<dyn GrammarState>>) -> Result<(), RequestError>,
    ) -> TokenSet {
        let mut state = self.state.lock();
        let allowed = change(&mut state).and_then(|()| match state.as_mut() {
            Some(state) => state.allowed(),
            None => Ok(self.without_ends.clone()),
        });
        match allowed {
            Ok(allowed) if position < self.ends_from => {
                let without = allowed.and(&self.without_ends);
                if without.is_empty() { allowed } else { without }
            }
            Ok(allowed) => allowed,
            Err(error) => {
                *state = None;
                self.fail(error)
            }
        }
    }

    /// Keeps the failure, and lets a row draw some token, which nobody takes.
    fn fail(&self, error: RequestError) -> TokenSet {
        let _ = self.failed.set(error);
        self.without_ends.clone()
    }
}
