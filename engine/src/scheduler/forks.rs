//! Sequences with an identical prompt, such as samples of one request: its KV is computed once, and each sequence continues in its own
//! blocks from where their tokens differ.

use super::entry::Entry;
use super::{Scheduler, SequenceKey};
use baton_kv_cache::ForkCopy;

impl Scheduler {
    /// Forks the blocks of a sequence that has computed its prompt, for all waiting sequences with the same prompt. The returned copies
    /// must be made before anything else happens to the blocks.
    pub fn fork_for_waiting(&mut self, computed: SequenceKey) -> Vec<ForkCopy> {
        let Some(prompt) = self.entries.get(&computed).and_then(Entry::computed_prompt) else { return Vec::new() };
        let alike = |entry: &Entry| entry.lease.is_none() && entry.prompt() == Some(prompt);
        let waiting: Vec<_> = self.entries.iter().filter(|(_, entry)| alike(entry)).map(|(key, _)| *key).collect();
        waiting.into_iter().filter_map(|waiting| self.fork(computed, waiting)).collect()
    }

    /// The same for a new sequence, if another holds the KV of its prompt.
    pub fn fork_for_new(&mut self, new: SequenceKey) -> Option<ForkCopy> {
        let prompt = self.entries.get(&new).filter(|entry| entry.lease.is_none())?.prompt()?;
        let (computed, _) = self.entries.iter().find(|(_, entry)| entry.computed_prompt() == Some(prompt))?;
        self.fork(*computed, new)
    }

    /// Gives `waiting` a fork of the blocks of `computed`; returns the copy that it needs, if any. It gets no blocks if
    /// - logits of its own prompt come back,
    /// - a sequence before it waits for blocks,
    /// - more sequences hold blocks than may run at once,
    /// - there is no room for its own block above the watermark and the reservation before it, or
    /// - the other one no longer has what it needs: blocks have left its window, or its states are those of its last token.
    fn fork(&mut self, computed: SequenceKey, waiting: SequenceKey) -> Option<ForkCopy> {
        let place = self.place(waiting);
        let overtakes = self.entries.iter().any(|(key, entry)| entry.lease.is_none() && self.place(*key) < place);
        let hold = self.entries.values().filter(|entry| entry.lease.is_some()).count();
        let (len, is_scored) = (self.entries[&waiting].len, self.entries[&waiting].is_scored());
        if is_scored || overtakes || hold >= self.config.running_max || len == 1 {
            return None;
        }
        // All but the last token, whose logits it needs.
        let tokens = len - 1;
        let kept = self.kept(self.awaited_before(waiting));
        let (lease, copy) = self.entries[&computed].lease.as_ref()?.fork(tokens, len, &kept)?;
        self.entries.get_mut(&waiting)?.admit(lease, tokens, tokens);
        copy
    }
}
