//! Models with states: where parts of a prompt end, so that states are cached that later prompts go on from.

use super::Scheduler;
use super::entry::Entry;

impl Entry {
    /// A step is done whose rows are all recorded.
    pub(super) fn settle(&mut self) {
        if let Some(lease) = &mut self.lease {
            lease.settle(self.computed, self.given);
        }
    }

    /// How many of `rows` rows of a prompt to compute at once, of those from the next position on.
    ///
    /// Two ends are always made: behind the last whole block, where an identical prompt and what continues this one go on, and where other
    /// prompts that begin alike went on in another way. Elsewhere a part ends behind a whole block if it reaches one.
    fn part(&self, rows: usize, block_tokens: usize) -> usize {
        if self.prefix.is_none() || rows == 0 {
            return rows;
        }
        let (from, to) = (self.position(), self.position() + rows);
        let whole = |tokens: usize| tokens / block_tokens * block_tokens;
        let ends = [whole(self.len - 1), self.known].into_iter().filter(|end| (from + 1..=to).contains(end));
        let reached = if to < self.len { Some(whole(to)).filter(|end| *end > from) } else { None };
        ends.min().or(reached).unwrap_or(to) - from
    }

    /// Whether the next step can be planned while the launched ones run: they must leave the state in the block in which it is.
    fn stays(&self, block_tokens: usize) -> bool {
        let block = |tokens: usize| tokens.checked_sub(1).map(|last| last / block_tokens);
        self.launched_rows == 0 || (self.computed > 0 && block(self.computed) == block(self.position()))
    }
}

impl Scheduler {
    /// The most of `rows` rows that the next step may compute of a sequence; `is_prompt`: of its prompt.
    pub(super) fn rows_with_states(&self, entry: &Entry, rows: usize, is_prompt: bool) -> usize {
        let size = self.config.block_tokens;
        match self.has_states {
            true if !entry.stays(size) => 0,
            true if is_prompt => entry.part(rows, size),
            _ => rows,
        }
    }
}
