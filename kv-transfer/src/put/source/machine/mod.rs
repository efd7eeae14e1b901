//! The source's state machine of one put: when to copy, flush and commit, and when its blocks may be released. Pure: it takes inputs and
//! the time, and returns actions.
//!
//! ```text
//! Offering ──► Writing ──► Committed ──► done
//!    └────────────┴─► Flushing (abort) ────┘
//! ```

use crate::HandoffFailure;
use crate::checksum::{GRANULE, sums_of};
use crate::message::SumRun;
use crate::plan::first_moved;
use baton_types::{GroupKind, KvGroup, KvLayout, TicketId};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// An event of one put, as its source sees it.
#[derive(Debug)]
pub(crate) enum SourceInput {
    /// The sink granted blocks, and already has the positions before `from`.
    Granted { ticket: TicketId, from: u32 },
    /// The sink refused, or cannot be reached.
    Refused(HandoffFailure),
    /// KV of this model layer may be read for positions `0..tokens_end`.
    LayerReady { layer: u32, tokens_end: u32 },
    /// The device failed; its output is missing.
    DeviceFailed,
    /// Only launched layers will still become ready.
    Finish,
    /// Every copy of this epoch and earlier ones is visible at the sink, or never will be.
    Flushed { epoch: u32, ok: bool },
    /// Checksums of one copy of this epoch.
    Summed { epoch: u32, run: SumRun },
    /// The sink adopted the sequence.
    Acked,
    /// The sink will not adopt it.
    Nacked(HandoffFailure),
    /// The sink asks to stop writing.
    AbortedBySink(String),
    /// The owner of the handle aborts.
    Abort(HandoffFailure),
    /// The connection is closed, and every operation that read these blocks has ended.
    ConnectionLost(String),
    /// Time passed: deadlines may be over.
    Tick,
}

/// What the source must do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SourceAction {
    /// Copy positions `tokens` of a layer (of the group) to the sink, and compute their checksums.
    Copy {
        epoch: u32,
        group: usize,
        layer: usize,
        tokens: Range<u32>,
    },
    /// Report [`SourceInput::Flushed`] once all copies requested so far are visible.
    Flush {
        epoch: u32,
    },
    /// Drop the copies that are not posted yet.
    Cancel,
    SendChecksums(Vec<SumRun>),
    SendCommit {
        sums: u64,
        bytes: u64,
    },
    /// Notify the sink that no more writes follow.
    SendAborted {
        flushed: bool,
        detail: String,
    },
    /// Writes in flight do not end by themselves: end them by closing the connection.
    Disconnect,
    /// Nothing reads the blocks any more.
    ReleaseHold,
    /// The handoff has ended. Always the last action.
    Done(Result<(), HandoffFailure>),
}

/// The copies that one flush makes visible, with their checksums.
#[derive(Debug, Default)]
struct Epoch {
    bytes: u64,
    /// Copies whose checksums are not computed yet.
    unsummed: usize,
    closed: bool,
    flushed: bool,
    runs: Vec<SumRun>,
}

#[derive(Debug)]
enum State {
    /// The sink has not granted it yet.
    Offering,
    Writing,
    /// The commit is sent.
    Committed,
    /// Aborted; waits until this instant for the flush of posted writes.
    Flushing(HandoffFailure, Instant),
    Ended,
}

/// The source's state of one handoff.
#[derive(Debug)]
pub(crate) struct Source {
    layout: KvLayout,
    /// Bytes to move per token in one layer, by group.
    token_bytes: Vec<usize>,
    /// `(group, layer of the group)` by model layer; `None` for numbers that the layout skips.
    layers: Vec<Option<(usize, usize)>>,
    tokens: u32,
    /// First position to move; known with the grant.
    from: u32,
    /// The same by group, where groups differ.
    starts: Vec<u32>,
    deadline: Instant,
    epoch_bytes: u64,
    flush_wait: Duration,
    state: State,
    ticket: Option<TicketId>,
    finished: bool,
    /// By model layer: positions that are readable, and positions whose copies were requested.
    ready: Vec<u32>,
    copied: Vec<u32>,
    first_epoch: u32,
    epochs: VecDeque<Epoch>,
    sums: u64,
    bytes: u64,
}

impl Source {
    pub(crate) fn new(
        layout: KvLayout,
        tokens: u32,
        deadline: Instant,
        epoch_bytes: u64,
        flush_wait: Duration,
    ) -> Self {
        let last = layout.groups().iter().flat_map(|g| &g.layers).max().copied().unwrap_or(0);
        let mut layers = vec![None; last as usize + 1];
        for (g, group) in layout.groups().iter().enumerate() {
            for (l, &layer) in group.layers.iter().enumerate() {
                layers[layer as usize] = Some((g, l));
            }
        }
        let (ready, copied) = (vec![0; layers.len()], vec![0; layers.len()]);
        let (state, epochs) = (State::Offering, VecDeque::from([Epoch::default()]));
        let (from, ticket, finished, first_epoch, sums, bytes) = (0, None, false, 0, 0, 0);
        let token_bytes = layout.groups().iter().map(KvGroup::token_bytes).collect();
        let starts = first_moved(&layout, &layout, 0, tokens);
        Self {
            layout,
            token_bytes,
            layers,
            tokens,
            from,
            starts,
            deadline,
            epoch_bytes,
            flush_wait,
            state,
            ticket,
            finished,
            ready,
            copied,
            first_epoch,
            epochs,
            sums,
            bytes,
        }
    }

    /// Restricts the copies to some heads: this many bytes of each token move. Call it before the grant.
    pub(crate) fn cut(&mut self, token_bytes: Vec<usize>) {
        self.token_bytes = token_bytes;
    }

    /// Restricts the copies of each group to the positions from these on. Call it before the grant.
    pub(crate) fn start_at(&mut self, starts: Vec<u32>) {
        self.starts = starts;
    }

    pub(crate) fn ticket(&self) -> Option<TicketId> {
        self.ticket
    }

    /// Number of positions that move, as far as is known.
    pub(crate) fn tokens_moved(&self) -> u32 {
        self.tokens - self.from
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Processes an input, and returns the actions in order.
    pub(crate) fn handle(&mut self, now: Instant, input: SourceInput) -> Vec<SourceAction> {
        let mut actions = Vec::new();
        if matches!(self.state, State::Ended) {
            return actions;
        }
        match input {
            SourceInput::Granted { from, .. } if !from.is_multiple_of(GRANULE) || from >= self.tokens => {
                let failure = HandoffFailure::Protocol(format!("a grant from position {from} of {} on", self.tokens));
                self.give_up(failure, now, &mut actions);
            }
            SourceInput::Granted { ticket, from } if matches!(self.state, State::Offering) => {
                (self.ticket, self.from) = (Some(ticket), from);
                for (copied, place) in self.copied.iter_mut().zip(&self.layers) {
                    *copied = place.map_or(from, |(group, _)| from.max(self.starts[group]));
                }
                self.state = State::Writing;
                self.copy_ready(&mut actions);
            }
            SourceInput::Granted { .. } => {
                self.give_up(HandoffFailure::Protocol("two grants".into()), now, &mut actions)
            }
            SourceInput::Refused(failure) if matches!(self.state, State::Offering) => {
                self.end(Err(failure), &mut actions)
            }
            // No correct sink refuses after a grant. Writes may be in flight, and the blocks must stay until they end.
            SourceInput::Refused(failure) => self.give_up(failure, now, &mut actions),
            SourceInput::LayerReady { layer, tokens_end } => {
                let ready = self.ready.get_mut(layer as usize).filter(|_| self.layers[layer as usize].is_some());
                match ready {
                    Some(ready) => *ready = (*ready).max(tokens_end.min(self.tokens)),
                    None => self.give_up(HandoffFailure::Protocol(format!("no layer {layer}")), now, &mut actions),
                }
                self.copy_ready(&mut actions);
            }
            SourceInput::DeviceFailed => {
                let failure = HandoffFailure::Device("the source's, before the blocks were finished".into());
                self.give_up(failure, now, &mut actions);
            }
            SourceInput::Finish => {
                self.finished = true;
                self.copy_ready(&mut actions);
            }
            SourceInput::Summed { epoch, run } => {
                if let Some(epoch) = self.epoch(epoch) {
                    epoch.unsummed -= 1;
                    epoch.runs.push(run);
                }
                self.send_epochs(&mut actions);
            }
            SourceInput::Flushed { epoch, ok } => self.flushed(epoch, ok, now, &mut actions),
            SourceInput::Acked => match self.state {
                State::Committed => self.end(Ok(()), &mut actions),
                _ => self.give_up(HandoffFailure::Protocol("acknowledged before the commit".into()), now, &mut actions),
            },
            // Confirms again that nothing is in flight: the refusal may have come before the commit arrived.
            SourceInput::Nacked(failure) => self.give_up(failure, now, &mut actions),
            SourceInput::AbortedBySink(detail) => {
                self.give_up(HandoffFailure::AbortedByPeer(detail), now, &mut actions);
            }
            SourceInput::Abort(failure) => self.give_up(failure, now, &mut actions),
            SourceInput::ConnectionLost(detail) => {
                let failure = match std::mem::replace(&mut self.state, State::Ended) {
                    State::Flushing(failure, _) => failure,
                    _ => HandoffFailure::PeerLost(detail),
                };
                self.end(Err(failure), &mut actions);
            }
            SourceInput::Tick => self.tick(now, &mut actions),
        }
        actions
    }

    fn tick(&mut self, now: Instant, actions: &mut Vec<SourceAction>) {
        if let State::Flushing(_, until) = self.state {
            if now >= until {
                actions.push(SourceAction::Disconnect);
            }
        } else if now >= self.deadline {
            let doing = match self.state {
                State::Offering => "waiting for a grant",
                State::Writing => "writing",
                State::Committed => "waiting for the acknowledgement",
                State::Flushing(..) | State::Ended => return,
            };
            self.give_up(HandoffFailure::Deadline(doing), now, actions);
        }
    }

    /// Requests every copy that is ready: whole blocks (the first one from the end of the sink's cached KV), and the rest once everything
    /// is ready. A state is ready once all positions are: those that chunks leave before are never sent.
    fn copy_ready(&mut self, actions: &mut Vec<SourceAction>) {
        if !matches!(self.state, State::Writing) {
            return;
        }
        let block = self.layout.block_tokens();
        for index in 0..self.layers.len() {
            let Some((group, layer)) = self.layers[index] else { continue };
            let ready = self.ready[index];
            let shape = &self.layout.groups()[group];
            let end = match shape.kind {
                _ if ready == self.tokens => ready,
                GroupKind::State => continue,
                _ => ready / block * block,
            };
            let tokens = self.copied[index]..end;
            if tokens.is_empty() {
                continue;
            }
            self.copied[index] = end;
            let bytes = (self.token_bytes[group] * shape.rows(tokens.len())) as u64;
            self.sums += sums_of(&self.layout, group, &tokens) as u64;
            self.bytes += bytes;
            let number = self.first_epoch + self.epochs.len() as u32 - 1;
            let epoch = self.epochs.back_mut().expect("one epoch is always open");
            epoch.bytes += bytes;
            epoch.unsummed += 1;
            let full = epoch.bytes >= self.epoch_bytes;
            actions.push(SourceAction::Copy { epoch: number, group, layer, tokens });
            if full {
                self.close_epoch(actions);
            }
        }
        let all = self.layers.iter().zip(&self.copied).all(|(l, &copied)| l.is_none() || copied == self.tokens);
        if self.finished && all {
            self.close_epoch(actions);
        }
        self.send_epochs(actions);
    }

    /// Closes the current epoch, if it is not empty, and opens the next.
    fn close_epoch(&mut self, actions: &mut Vec<SourceAction>) {
        let number = self.first_epoch + self.epochs.len() as u32 - 1;
        let epoch = self.epochs.back_mut().expect("one epoch is always open");
        if epoch.bytes > 0 {
            epoch.closed = true;
            self.epochs.push_back(Epoch::default());
            actions.push(SourceAction::Flush { epoch: number });
        }
    }

    fn epoch(&mut self, number: u32) -> Option<&mut Epoch> {
        let index = number.checked_sub(self.first_epoch)?;
        self.epochs.get_mut(index as usize)
    }

    fn flushed(&mut self, epoch: u32, ok: bool, now: Instant, actions: &mut Vec<SourceAction>) {
        if let State::Flushing(failure, _) = &self.state {
            if epoch != ABORT_EPOCH {
                return;
            }
            let failure = failure.clone();
            actions.push(SourceAction::SendAborted { flushed: ok, detail: failure.to_string() });
            return self.end(Err(failure), actions);
        }
        if !ok {
            return self.give_up(HandoffFailure::PeerLost("a flush failed".into()), now, actions);
        }
        if let Some(last) = epoch.checked_sub(self.first_epoch) {
            self.epochs.iter_mut().take(last as usize + 1).filter(|e| e.closed).for_each(|e| e.flushed = true);
        }
        self.send_epochs(actions);
    }

    /// Sends the checksums of epochs that are visible and summed, in order, and the commit after the last one.
    fn send_epochs(&mut self, actions: &mut Vec<SourceAction>) {
        if !matches!(self.state, State::Writing) {
            return;
        }
        while self.epochs.front().is_some_and(|e| e.flushed && e.unsummed == 0) {
            let epoch = self.epochs.pop_front().expect("checked");
            self.first_epoch += 1;
            actions.push(SourceAction::SendChecksums(epoch.runs));
        }
        let all = self.layers.iter().zip(&self.copied).all(|(l, &copied)| l.is_none() || copied == self.tokens);
        let drained = self.epochs.len() == 1 && self.epochs[0].bytes == 0;
        if self.finished && all && drained {
            self.state = State::Committed;
            actions.push(SourceAction::SendCommit { sums: self.sums, bytes: self.bytes });
        }
    }

    /// Ends without success: at once if nothing was written, otherwise after a flush or the end of the connection.
    fn give_up(&mut self, failure: HandoffFailure, now: Instant, actions: &mut Vec<SourceAction>) {
        match self.state {
            State::Ended | State::Flushing(..) => {}
            State::Writing => {
                actions.push(SourceAction::Cancel);
                actions.push(SourceAction::Flush { epoch: ABORT_EPOCH });
                self.state = State::Flushing(failure, now + self.flush_wait);
            }
            // Before the grant nothing was posted; after the commit everything was flushed.
            State::Offering | State::Committed => {
                actions.push(SourceAction::SendAborted { flushed: true, detail: failure.to_string() });
                self.end(Err(failure), actions);
            }
        }
    }

    fn end(&mut self, result: Result<(), HandoffFailure>, actions: &mut Vec<SourceAction>) {
        self.state = State::Ended;
        actions.extend([SourceAction::Cancel, SourceAction::ReleaseHold, SourceAction::Done(result)]);
    }
}

/// Number of the flush that an abort waits for; no handoff has that many epochs.
pub(crate) const ABORT_EPOCH: u32 = u32::MAX;

#[cfg(test)]
mod tests;
