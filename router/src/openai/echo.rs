//! Log-probabilities of prompts that streams show once, before the tokens of each choice.

use crate::output::{Choices, Delta, make_room};
use baton_node::intake::Hold;
use baton_types::{PromptLogprob, RequestError};

/// What is kept of all prompts until the last choice of each has shown it.
pub(super) struct Echoes {
    prompts: Vec<Echo>,
    hold: Hold,
    bytes: u64,
}

#[derive(Clone, Default)]
struct Echo {
    scored: Vec<PromptLogprob>,
    /// Memory of them, and of a chunk that shows them.
    bytes: u64,
    /// Choices that have not shown it.
    missing: u32,
}

impl Echoes {
    /// Nothing is known of any prompt.
    pub(super) fn new(choices: Choices, hold: Hold) -> Self {
        let echo = Echo { missing: choices.samples, ..Echo::default() };
        Self { prompts: vec![echo; choices.prompts as usize], hold, bytes: 0 }
    }

    /// Keeps a part of a prompt, of which a choice shows `written` bytes.
    ///
    /// # Errors
    /// If the budget has no room.
    pub(super) fn keep(&mut self, prompt: usize, part: &Delta, written: u64) -> Result<(), RequestError> {
        let Some(echo) = self.prompts.get_mut(prompt) else { return Ok(()) };
        let bytes = part.bytes() + written;
        make_room(&mut self.hold, self.bytes + bytes)?;
        (self.bytes, echo.bytes) = (self.bytes + bytes, echo.bytes + bytes);
        echo.scored.extend_from_slice(&part.prompt);
        Ok(())
    }

    /// What is known of a prompt.
    pub(super) fn of(&self, prompt: usize) -> &[PromptLogprob] {
        self.prompts.get(prompt).map_or(&[], |echo| &echo.scored)
    }

    /// A choice has shown it. After the last one, it is kept no longer.
    pub(super) fn shown(&mut self, prompt: usize) {
        let Some(echo) = self.prompts.get_mut(prompt) else { return };
        echo.missing = echo.missing.saturating_sub(1);
        if echo.missing == 0 {
            self.bytes -= std::mem::take(echo).bytes;
            // A smaller hold always fits.
            let _ = self.hold.set(self.bytes);
        }
    }
}
