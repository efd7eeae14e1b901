//! The decisions for one step, made in one pass over the sequences in order.

use super::entry::{Stage, Standing};
use super::fair_share::PrefillRows;
use super::{Conditions, Scheduler, SequenceKey};
use baton_kv_cache::{Lease, StateBefore};
use std::time::Instant;

/// Sequences are prepared that run now or in the next batch. Others wait without, because what prepares them takes memory.
const PREPARED_BATCHES: usize = 2;

/// Rows of one sequence in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Key of the sequence that the rows belong to.
    pub key: SequenceKey,
    /// First position to compute.
    pub position: usize,
    /// Number of rows from there on.
    pub rows: usize,
    /// Whether the last row's logits determine the next token.
    pub samples: bool,
    /// Whether this is a decode row, and rows of proposals behind it, or rows of an answer that a state takes in again; otherwise prefill.
    pub decode: bool,
    /// How many of the rows are those of proposed tokens. Each of them samples too.
    pub drafts: usize,
    /// Of how many rows, from the position `scored_from` on, the logits come back for the log-probabilities of the prompt. None of them samples.
    pub scored: usize,
    /// Position of the first of them.
    pub scored_from: usize,
}

impl Segment {
    /// Most tokens that it samples.
    pub fn tokens_max(&self) -> usize {
        if self.samples { 1 + self.drafts } else { 0 }
    }
}

/// Why the scheduler ends a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its deadline has passed.
    Deadline,
    /// Its sink had no room for too long.
    Stalled,
}

/// The decisions of one plan.
#[derive(Debug, Default)]
pub struct Decisions {
    /// Sequences that ended, with the blocks they held.
    pub ended: Vec<(SequenceKey, End, Option<Lease>)>,
    /// Sequences that lost their blocks and wait again.
    pub preempted: Vec<SequenceKey>,
    /// Sequences that left the queue for the first time.
    pub started: Vec<SequenceKey>,
    /// The next sequences that would run, but are not prepared.
    pub to_prepare: Vec<SequenceKey>,
    /// The next step; empty if nothing can run.
    pub batch: Vec<Segment>,
    /// Whether a sequence lacks blocks: meanwhile no blocks should be leased to peers.
    pub starved: bool,
    /// When to plan again even without events.
    pub wake_at: Option<Instant>,
}

/// State of one pass.
struct Pass<'a> {
    now: Instant,
    ready: &'a [SequenceKey],
    prefill: PrefillRows,
    running: usize,
    /// The last sequence that was running when the pass began and may lose its place: sequences after it cannot take one.
    last_parkable: Option<Standing>,
    /// No further sequence is admitted in this pass: an earlier one lacks blocks or rows.
    closed: bool,
    /// A sequence is held or paused.
    held: bool,
    /// A sequence needs what later ones of a launched step have: no later one is launched again.
    waits: bool,
}

impl Scheduler {
    /// Decides the next step. Every decision has taken effect when this returns.
    pub fn plan(&mut self, now: Instant, conditions: &dyn Conditions) -> Decisions {
        let mut decisions = Decisions::default();
        self.is_retiring = conditions.is_retiring();
        self.end_overdue(now, conditions, &mut decisions);
        self.note_shares();
        if !self.reclaim_for_awaited(&mut decisions.preempted) {
            return decisions;
        }
        let mut ready: Vec<SequenceKey> =
            self.entries.keys().copied().filter(|key| self.is_ready(*key, conditions)).collect();
        if self.tenants > 1 {
            ready.sort_by_cached_key(|key| self.place(*key));
        }
        let held = ready.len() < self.entries.len();
        let is_prepared = |key: &SequenceKey| conditions.is_prepared(*key);
        let next = ready.iter().take(PREPARED_BATCHES * self.config.running_max);
        decisions.to_prepare = next.filter(|key| !is_prepared(key)).copied().collect();
        ready.retain(is_prepared);
        let mut pass = self.open_pass(now, &ready, held);
        for key in &ready {
            self.visit(*key, conditions, &mut pass, &mut decisions);
            if pass.waits {
                break;
            }
        }
        if !pass.waits {
            self.use_up(conditions, &pass, &mut decisions);
        }
        decisions.wake_at = self.wake_at(now, pass.held);
        decisions
    }

    fn end_overdue(&mut self, now: Instant, conditions: &dyn Conditions, decisions: &mut Decisions) {
        let mut overdue = Vec::new();
        for (key, entry) in &mut self.entries {
            if conditions.has_room(*key) {
                entry.paused_since = None;
            } else {
                entry.paused_since.get_or_insert(now);
            }
            if entry.deadline <= now {
                overdue.push((*key, End::Deadline));
            } else if entry.paused_since.is_some_and(|since| now.duration_since(since) >= self.config.stall) {
                overdue.push((*key, End::Stalled));
            }
        }
        for (key, end) in overdue {
            self.is_retiring |= self.entries[&key].launched_rows > 0;
            let lease = self.remove(key);
            decisions.ended.push((key, end, lease));
        }
    }

    fn is_ready(&self, key: SequenceKey, conditions: &dyn Conditions) -> bool {
        let entry = &self.entries[&key];
        entry.paused_since.is_none() && conditions.is_open(key, entry.phase())
    }

    fn open_pass<'a>(&mut self, now: Instant, ready: &'a [SequenceKey], held: bool) -> Pass<'a> {
        let single_rows =
            ready.iter().map(|key| &self.entries[key]).filter(|e| e.is_decode()).count().min(self.config.running_max);
        // At least one row: a full batch slows prefill down but never stops it. Rows stay within `EngineConfig::step_rows_max`, because a
        // sequence in prefill takes one of the `running_max` places.
        let beside_decode = if single_rows > 0 { self.config.mixed_chunk_tokens_max } else { usize::MAX };
        let rows = self.config.chunk_tokens_max.saturating_sub(single_rows).min(beside_decode).max(1);
        let running = self.entries.iter().filter(|(_, e)| e.stage == Stage::Running);
        let parkable = running.filter(|(_, e)| e.is_preemptable());
        let last_parkable = parkable.map(|(key, entry)| Standing::new(*key, entry.is_beyond)).max();
        Pass {
            prefill: self.divide_rows(ready, rows),
            running: self.totals().running,
            last_parkable,
            closed: false,
            held,
            waits: false,
            now,
            ready,
        }
    }

    fn visit(&mut self, key: SequenceKey, conditions: &dyn Conditions, pass: &mut Pass<'_>, decisions: &mut Decisions) {
        // An earlier iteration may have preempted it; then it waits.
        if self.entries[&key].stage == Stage::Waiting && !self.try_start(key, pass, decisions) {
            return;
        }
        let entry = &self.entries[&key];
        if !conditions.is_open(key, entry.running_phase()) {
            pass.held = true;
            return;
        }
        if entry.launched_tokens > 0 && !conditions.continues(key) {
            return;
        }
        let (position, pending, decode, share) = (entry.position(), entry.pending(), entry.is_decode(), entry.share);
        let rows = if decode { 1 } else { pending.min(pass.prefill.of(key, share)) };
        let rows = entry.with_scored(position, rows, pass.prefill.scored_of(key, share));
        let rows = self.rows_with_states(entry, rows, !decode);
        if rows == 0 {
            return;
        }
        let before = decisions.preempted.len();
        // A launched step reads what its own positions need.
        let computed = self.entries[&key].computed;
        if !self.ensure(key, computed..position + rows, &mut decisions.preempted) {
            if self.quarantine_keeps_out(position + rows) && self.preempt(key, &mut decisions.preempted) {
                // It returns to the queue until the quarantine ends, and its blocks are free for others.
                pass.running = self.totals().running;
                return;
            }
            let missing = self.lease(key).map(|lease| lease.missing(computed..position + rows, StateBefore::Replaced));
            let missing = missing.unwrap_or_default();
            pass.waits |= self.can_reclaim_launched(key, &missing);
            decisions.starved = true;
            pass.closed = true;
            return;
        }
        self.count_preemptions(before, pass, decisions);
        let scored = self.entries[&key].scored_in(position, rows);
        if !decode {
            pass.prefill.take(key, share, rows, scored.len());
        }
        let decode = self.entries[&key].is_generating();
        let (scored_from, scored, samples) = (scored.start, scored.len(), rows == pending);
        decisions.batch.push(Segment { key, position, rows, samples, decode, drafts: 0, scored, scored_from });
    }

    /// Moves a waiting sequence into the running batch if it may.
    fn try_start(&mut self, key: SequenceKey, pass: &mut Pass<'_>, decisions: &mut Decisions) -> bool {
        let entry = &self.entries[&key];
        let (len, brings_blocks, decode) = (entry.len, entry.lease.is_some(), entry.is_decode());
        if !decode && pass.prefill.of(key, entry.share) == 0 {
            return false;
        }
        let may_park = pass.last_parkable.is_some_and(|last| last > self.place(key));
        if pass.running >= self.config.running_max && !(may_park && self.last_parkable_after(key).is_some()) {
            pass.waits |= self.can_park_launched(key);
            return false;
        }
        if !brings_blocks {
            if pass.closed || self.awaits_prefix(key, pass.ready, pass.now) {
                return false;
            }
            let before = decisions.preempted.len();
            let lease = self.admit(key, pass.now, &mut decisions.preempted);
            self.count_preemptions(before, pass, decisions);
            let Some(lease) = lease else {
                // The end of a quarantine is unknown, so a sequence that waits for it does not hold up others.
                if !self.quarantine_keeps_out(len) {
                    pass.waits |= self.can_reclaim_launched(key, &self.needs(len));
                    // A sequence that makes way for a reservation does not count as starved, or the reservation would get no blocks.
                    decisions.starved |= self.awaited_before(key).is_none();
                    pass.closed = true;
                }
                return false;
            };
            let [cached, known] = [lease.cached_blocks(), lease.known_blocks()].map(|n| n * self.config.block_tokens);
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.admit(lease, cached, known);
            }
        }
        if pass.running >= self.config.running_max && !self.park_last_after(key) {
            return false;
        }
        pass.running = self.totals().running + 1;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.stage = Stage::Running;
            if !std::mem::replace(&mut entry.started, true) {
                decisions.started.push(key);
            }
        }
        true
    }

    /// Gives rows that a tenant could not use, for lack of blocks or a place, to sequences that are already in prefill. Those have blocks
    /// for their whole prompts, so no sequence loses any. If these rows were lost, two sequences could wait for each other.
    fn use_up(&mut self, conditions: &dyn Conditions, pass: &Pass<'_>, decisions: &mut Decisions) {
        let (mut left, mut scored_left) = pass.prefill.unused();
        for key in pass.ready.iter().copied() {
            let Some(entry) = self.entries.get(&key) else { continue };
            if entry.stage != Stage::Running || entry.is_decode() {
                continue;
            }
            let segment = decisions.batch.iter_mut().find(|segment| segment.key == key);
            let rows = segment.as_ref().map_or(0, |segment| segment.rows);
            let position = entry.position();
            let scored = segment.as_ref().map_or(0, |segment| segment.scored);
            let mut more = left.min(entry.pending() - rows);
            more = entry.with_scored(position, rows + more, scored_left + scored).saturating_sub(rows);
            more = self.rows_with_states(entry, rows + more, true).saturating_sub(rows);
            if more == 0 || !conditions.is_open(key, entry.running_phase()) {
                continue;
            }
            // Where it exchanges blocks of a window, it has as many as it needs at once.
            let computed = entry.computed;
            let Some(lease) = self.entries.get_mut(&key).and_then(|entry| entry.lease.as_mut()) else { continue };
            if !lease.hold(computed..position + rows + more, StateBefore::Replaced) {
                let covered = lease.blocks_end() * self.config.block_tokens;
                more = more.min(covered.saturating_sub(position + rows));
            }
            if more == 0 {
                continue;
            }
            left -= more;
            let (entry, rows) = (&self.entries[&key], rows + more);
            let in_rows = entry.scored_in(position, rows);
            scored_left -= in_rows.len() - scored;
            let (samples, scored, scored_from) = (rows == entry.pending(), in_rows.len(), in_rows.start);
            let decode = entry.is_generating();
            let whole = Segment { key, position, rows, samples, decode, drafts: 0, scored, scored_from };
            match segment {
                Some(segment) => *segment = whole,
                None => decisions.batch.push(whole),
            }
        }
    }

    /// A sequence that was preempted in this pass is not admitted again in it: the freed blocks would not last.
    fn count_preemptions(&self, before: usize, pass: &mut Pass<'_>, decisions: &Decisions) {
        if decisions.preempted.len() > before {
            pass.closed = true;
            pass.running = self.totals().running;
        }
    }

    fn wake_at(&self, now: Instant, held: bool) -> Option<Instant> {
        let waits = self.entries.values().filter(|e| e.lease.is_none()).filter_map(|e| e.shares_until);
        let deadline = self.entries.values().map(|e| e.deadline).chain(waits.filter(|until| *until > now)).min();
        let recheck = held.then(|| now + self.config.recheck);
        deadline.into_iter().chain(recheck).min()
    }
}
