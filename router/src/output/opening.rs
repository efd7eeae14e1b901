//! What comes before the head of an answer.

use super::Event;
use super::events::{Events, lost};
use super::room::{DOUBLES, make_room, no_room};
use baton_node::intake::Hold;
use baton_types::RequestError;
use futures::StreamExt as _;
use std::collections::VecDeque;

/// What an event takes that waits for its reader. Log-probabilities of twenty tokens are some hundred bytes.
pub(crate) const EVENT_BYTES: u64 = 512;

/// What comes before the head of an answer: the first token of each sample, since only then it is known what of the prompt was cached. Other
/// samples go on meanwhile, so it has room like a whole answer.
#[derive(Debug)]
pub(crate) struct Opening {
    events: Opened,
    kept: u64,
    missing: u32,
    cached_tokens: u32,
}

/// What was read before the head was written, in order, and the room for it. The rest of the room is for what a client leaves unread: it has
/// to live as long as the answer.
#[derive(Debug)]
pub(crate) struct Opened {
    events: VecDeque<Event>,
    hold: Hold,
    unread: u64,
}

impl Iterator for Opened {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if event.is_none() && self.hold.bytes() > self.unread {
            self.events = VecDeque::new();
            // Fewer always fit.
            let _ = self.hold.set(self.unread);
        }
        event
    }
}

impl Opening {
    /// Of an answer with so many samples, which takes `head` bytes and as many of its events as there may be until it is read: also one that
    /// has ended.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn new(samples: u32, events: &Events, head: u64, mut hold: Hold) -> Result<Self, RequestError> {
        let unread = head + EVENT_BYTES * events.max() as u64;
        hold.set(unread).map_err(no_room)?;
        let events = Opened { events: VecDeque::new(), hold, unread };
        Ok(Self { events, kept: 0, missing: samples, cached_tokens: u32::MAX })
    }

    /// Reads until all is known, or there is no room to wait for it. What was read is kept where this is given up before.
    pub(crate) async fn read(&mut self, events: &mut Events) -> Result<(), RequestError> {
        while self.missing > 0 {
            let event = events.next().await.unwrap_or_else(|| Err(lost()))?;
            if let Event::Delta(delta) = &event {
                self.kept += (DOUBLES * size_of::<Event>()) as u64 + delta.bytes();
                if let Some(cached) = delta.cached_tokens {
                    self.missing -= 1;
                    self.cached_tokens = self.cached_tokens.min(cached);
                }
            }
            self.events.events.push_back(event);
            if make_room(&mut self.events.hold, self.events.unread + self.kept).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// What was read, and tokens of the prompt whose KV was cached where that is known.
    pub(crate) fn done(self) -> (Opened, Option<u32>) {
        (self.events, (self.missing == 0).then_some(self.cached_tokens))
    }
}
