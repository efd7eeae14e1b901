//! Sequences with the very same prompt, samples of a request for instance: its KV is computed once, and each goes on in blocks of its
//! own from where they part.

use super::entry::Entry;
use super::{Scheduler, SequenceKey};
use baton_kv_cache::ForkCopy;

impl Scheduler {
    /// Forks the blocks of a sequence that has computed its prompt for all that wait with the same one. The copies that they need are to
    /// be made before anything else happens to blocks.
    pub fn fork_for_waiting(&mut self, computed: SequenceKey) -> Vec<ForkCopy> {
        let Some(prompt) = self.entries.get(&computed).and_then(Entry::computed_prompt) else { return Vec::new() };
        let alike = |entry: &Entry| entry.lease.is_none() && entry.prompt() == Some(prompt);
        let waiting: Vec<_> = self.entries.iter().filter(|(_, entry)| alike(entry)).map(|(key, _)| *key).collect();
        waiting.into_iter().filter_map(|waiting| self.fork(computed, waiting)).collect()
    }

    /// The same for one that has just come, if another holds the KV of its prompt.
    pub fn fork_for_new(&mut self, new: SequenceKey) -> Option<ForkCopy> {
        let prompt = self.entries.get(&new).filter(|entry| entry.lease.is_none())?.prompt()?;
        let (computed, _) = self.entries.iter().find(|(_, entry)| entry.computed_prompt() == Some(prompt))?;
        self.fork(*computed, new)
    }

    /// Gives `waiting` a fork of the blocks of `computed`; the copy that it needs, if any. It stays without blocks where somebody before it
    /// waits for some, where more hold blocks than run at once, and where there is no room for one of its own above the watermark and
    /// what a reservation before it waits for.
    fn fork(&mut self, computed: SequenceKey, waiting: SequenceKey) -> Option<ForkCopy> {
        let place = self.place(waiting);
        let overtakes = self.entries.iter().any(|(key, entry)| entry.lease.is_none() && self.place(*key) < place);
        let hold = self.entries.values().filter(|entry| entry.lease.is_some()).count();
        let len = self.entries[&waiting].len;
        if overtakes || hold >= self.config.running_max || len == 1 {
            return None;
        }
        let block_tokens = self.config.block_tokens;
        // All but the last token, of which it needs the logits.
        let tokens = len - 1;
        let fresh = len.div_ceil(block_tokens) - tokens / block_tokens;
        let kept = self.config.watermark_blocks + self.awaited_before(waiting).map_or(0, |awaited| awaited.blocks);
        let (lease, copy) = self.entries[&computed].lease.as_ref()?.fork(tokens, block_tokens, (fresh, kept))?;
        self.entries.get_mut(&waiting)?.admit(lease, tokens);
        copy
    }
}
