//! Allowed tokens that arrive while a step runs.

use crate::sampling::{SampleError, TokenSet};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// The allowed tokens of one row, which a host thread computes while the device computes the row's logits. Clones are one mask.
#[derive(Clone, Debug)]
pub struct LateMask(Arc<Promise>);

#[derive(Debug)]
struct Promise {
    deadline: Instant,
    tokens: Mutex<Option<Arc<TokenSet>>>,
    filled: Condvar,
}

impl LateMask {
    /// A mask that must be filled by this instant: a row whose mask is not there by then is not sampled.
    pub fn due(deadline: Instant) -> Self {
        Self(Arc::new(Promise { deadline, tokens: Mutex::default(), filled: Condvar::new() }))
    }

    /// A mask that is known already.
    pub fn known(tokens: TokenSet) -> Self {
        let mask = Self::due(Instant::now());
        mask.fill(Arc::new(tokens));
        mask
    }

    /// Sets the tokens, once.
    pub fn fill(&self, tokens: Arc<TokenSet>) {
        self.0.tokens.lock().get_or_insert(tokens);
        self.0.filled.notify_all();
    }

    /// Waits for the tokens, at most until the deadline.
    pub(crate) fn wait(&self) -> Result<Arc<TokenSet>, SampleError> {
        let mut tokens = self.0.tokens.lock();
        loop {
            if let Some(tokens) = &*tokens {
                return Ok(tokens.clone());
            }
            if self.0.filled.wait_until(&mut tokens, self.0.deadline).timed_out() && tokens.is_none() {
                return Err(SampleError::MaskLate);
            }
        }
    }
}

/// Equal if they are the same mask.
impl PartialEq for LateMask {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
