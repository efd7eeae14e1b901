//! The writes queued for one connection: posted within the credit, flushed in batches. Pure.
//!
//! A flush covers everything on its connection, so one flush at a time serves every handoff that requested one before it was posted.

use crate::plan::{CopyRun, LayerCopy};
use crate::role::HandoffKey;
use baton_types::TicketId;
use std::collections::VecDeque;

/// One entry of the queue.
enum Entry {
    Put {
        key: HandoffKey,
        epoch: u32,
        ticket: TicketId,
        copy: LayerCopy,
    },
    /// Requested by this handoff, for what it queued before.
    Flush {
        key: HandoffKey,
        epoch: u32,
    },
}

/// The next operation on the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Post {
    Put { key: HandoffKey, epoch: u32, ticket: TicketId, run: CopyRun },
    Flush { id: u64 },
}

pub(super) struct Pump {
    queue: VecDeque<Entry>,
    in_flight: usize,
    in_flight_max: usize,
    /// Requested flushes whose writes are all posted.
    waiting: Vec<(HandoffKey, u32)>,
    /// Requests that the flush in progress covers.
    covered: Vec<(HandoffKey, u32)>,
    flushing: Option<u64>,
    next_flush: u64,
    /// Handoffs that posted something since nothing was last under way.
    moving: Vec<HandoffKey>,
}

impl Pump {
    pub(super) fn new(in_flight_max: usize) -> Self {
        let (queue, waiting, covered, moving) = (VecDeque::new(), Vec::new(), Vec::new(), Vec::new());
        Self { queue, in_flight: 0, in_flight_max, waiting, covered, flushing: None, next_flush: 1, moving }
    }

    pub(super) fn put(&mut self, key: HandoffKey, epoch: u32, ticket: TicketId, copy: LayerCopy) {
        self.queue.push_back(Entry::Put { key, epoch, ticket, copy });
    }

    pub(super) fn flush(&mut self, key: HandoffKey, epoch: u32) {
        self.queue.push_back(Entry::Flush { key, epoch });
    }

    /// Flushes what is posted already, ahead of other handoffs' queued writes: for a handoff that was cancelled.
    pub(super) fn flush_posted(&mut self, key: HandoffKey, epoch: u32) {
        self.waiting.push((key, epoch));
    }

    /// Drops what this handoff has queued and not posted.
    pub(super) fn cancel(&mut self, key: HandoffKey) {
        self.queue.retain(|entry| match entry {
            Entry::Put { key: k, .. } | Entry::Flush { key: k, .. } => *k != key,
        });
    }

    /// The next operation to post, within the credit. A single write larger than the credit is posted alone.
    pub(super) fn next(&mut self) -> Option<Post> {
        loop {
            match self.queue.front_mut() {
                Some(Entry::Put { key, epoch, ticket, copy }) => match copy.peek() {
                    Some(run) if self.in_flight == 0 || self.in_flight + run.len <= self.in_flight_max => {
                        copy.next();
                        self.in_flight += run.len;
                        let (key, epoch, ticket) = (*key, *epoch, *ticket);
                        self.moves(key);
                        return Some(Post::Put { key, epoch, ticket, run });
                    }
                    Some(_) => break,
                    None => drop(self.queue.pop_front()),
                },
                Some(Entry::Flush { key, epoch }) => {
                    self.waiting.push((*key, *epoch));
                    self.queue.pop_front();
                }
                None => break,
            }
        }
        if self.flushing.is_some() || self.waiting.is_empty() {
            return None;
        }
        self.covered = std::mem::take(&mut self.waiting);
        let id = self.next_flush;
        self.next_flush += 1;
        self.flushing = Some(id);
        let covered: Vec<HandoffKey> = self.covered().collect();
        covered.into_iter().for_each(|key| self.moves(key));
        Some(Post::Flush { id })
    }

    fn moves(&mut self, key: HandoffKey) {
        if !self.moving.contains(&key) {
            self.moving.push(key);
        }
    }

    /// Handoffs that the flush in progress covers.
    pub(super) fn covered(&self) -> impl Iterator<Item = HandoffKey> {
        self.covered.iter().map(|(key, _)| *key)
    }

    /// If nothing is under way: the handoffs that posted something since this was last so.
    pub(super) fn idle(&mut self) -> Vec<HandoffKey> {
        if self.in_flight > 0 || self.flushing.is_some() { Vec::new() } else { std::mem::take(&mut self.moving) }
    }

    pub(super) fn put_done(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
    }

    /// A flush completed. Returns the handoffs that it covered, with the epochs that they requested.
    pub(super) fn flushed(&mut self, id: u64) -> Vec<(HandoffKey, u32)> {
        if self.flushing == Some(id) {
            self.flushing = None;
            std::mem::take(&mut self.covered)
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(len: usize) -> LayerCopy {
        LayerCopy::of_run(CopyRun { from: 0, to: 0, len })
    }

    fn posts(pump: &mut Pump) -> Vec<String> {
        std::iter::from_fn(|| pump.next())
            .map(|post| match post {
                Post::Put { key, run, .. } => format!("{key}:{}", run.len),
                Post::Flush { id } => format!("flush {id}"),
            })
            .collect()
    }

    #[test]
    fn writes_stay_within_the_credit_and_flushes_are_batched() {
        let mut pump = Pump::new(100);
        let ticket = TicketId(1);
        pump.put(HandoffKey(1), 0, ticket, run(60));
        pump.put(HandoffKey(2), 0, ticket, run(40));
        pump.put(HandoffKey(1), 0, ticket, run(50));
        pump.flush(HandoffKey(2), 0);
        pump.flush(HandoffKey(1), 0);
        assert_eq!(posts(&mut pump), ["1:60", "2:40"]);
        pump.put_done(60);
        assert_eq!(posts(&mut pump), ["1:50", "flush 1"]);
        assert_eq!((pump.idle(), pump.covered().collect::<Vec<_>>()), (vec![], vec![HandoffKey(2), HandoffKey(1)]));
        pump.flush(HandoffKey(1), 1);
        assert!(posts(&mut pump).is_empty(), "one flush at a time");
        assert_eq!(pump.flushed(7), []);
        assert_eq!(pump.flushed(1), [(HandoffKey(2), 0), (HandoffKey(1), 0)]);
        assert_eq!(posts(&mut pump), ["flush 2"]);
        pump.put_done(40);
        pump.put_done(50);
        assert!(pump.idle().is_empty(), "a flush is under way");
        assert_eq!(pump.flushed(2), [(HandoffKey(1), 1)]);
        assert_eq!(pump.idle(), [HandoffKey(1), HandoffKey(2)]);
        assert!(pump.idle().is_empty(), "told once");
    }

    #[test]
    fn a_write_above_the_credit_goes_alone() {
        let mut pump = Pump::new(10);
        pump.put(HandoffKey(1), 0, TicketId(1), run(50));
        pump.put(HandoffKey(1), 0, TicketId(1), run(1));
        assert_eq!(posts(&mut pump), ["1:50"]);
        pump.put_done(50);
        assert_eq!(posts(&mut pump), ["1:1"]);
    }

    #[test]
    fn a_cancelled_handoff_flushes_only_what_it_posted() {
        let mut pump = Pump::new(50);
        let ticket = TicketId(1);
        pump.put(HandoffKey(1), 0, ticket, run(50));
        pump.put(HandoffKey(1), 0, ticket, run(50));
        pump.put(HandoffKey(2), 0, ticket, run(20));
        assert_eq!(posts(&mut pump), ["1:50"]);
        pump.cancel(HandoffKey(1));
        pump.flush_posted(HandoffKey(1), 9);
        assert_eq!(posts(&mut pump), ["flush 1"]);
        pump.put_done(50);
        assert_eq!(posts(&mut pump), ["2:20"]);
        assert_eq!(pump.flushed(1), [(HandoffKey(1), 9)]);
    }
}
