//! What is read before the head of an answer is sent.

use super::budget::{DOUBLES, make_room, no_room};
use super::events::{Events, lost};
use super::{Choices, Event};
use baton_node::intake::Hold;
use baton_types::RequestError;
use futures::StreamExt as _;
use std::collections::VecDeque;

/// Memory of one event that waits for its reader. Log-probabilities of twenty tokens are a few hundred bytes.
pub(crate) const EVENT_BYTES: u64 = 512;

/// Reads until the first token of each sample, since only then the cached share of the prompt is known. Other samples
/// continue meanwhile, so it holds memory as for a whole answer.
#[derive(Debug)]
pub(crate) struct Opening {
    events: Opened,
    kept: u64,
    missing: u32,
    choices: Choices,
    /// Of each prompt, what no sample computed so far.
    cached_tokens: Vec<u32>,
}

/// The events read before the head was sent, in order, and the memory held for them. The rest of the hold is for output
/// that the client leaves unread: it must live as long as the answer.
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
            // A smaller hold always fits.
            let _ = self.hold.set(self.unread);
        }
        event
    }
}

impl Opening {
    /// For these answers. It holds `head` bytes, and memory for the most events that can wait until
    /// they are read, even if the answer has ended.
    ///
    /// # Errors
    /// If the budget has no room.
    pub(crate) fn new(choices: Choices, events: &Events, head: u64, mut hold: Hold) -> Result<Self, RequestError> {
        let unread = head + EVENT_BYTES * events.max() as u64;
        hold.set(unread).map_err(no_room)?;
        let events = Opened { events: VecDeque::new(), hold, unread };
        let cached_tokens = vec![u32::MAX; choices.prompts as usize];
        Ok(Self { events, kept: 0, missing: choices.count(), choices, cached_tokens })
    }

    /// Reads until the cached share is known, or the budget has no room. If this call is cancelled, what was read is
    /// kept.
    pub(crate) async fn read(&mut self, events: &mut Events) -> Result<(), RequestError> {
        while self.missing > 0 {
            let event = events.next().await.unwrap_or_else(|| Err(lost()))?;
            if let Event::Delta(delta) = &event {
                self.kept += (DOUBLES * size_of::<Event>()) as u64 + delta.bytes();
                if let Some(cached) = delta.cached_tokens {
                    self.missing -= 1;
                    if let Some(known) = self.cached_tokens.get_mut(self.choices.prompt_of(delta.sample)) {
                        *known = cached.min(*known);
                    }
                }
            }
            self.events.events.push_back(event);
            if make_room(&mut self.events.hold, self.events.unread + self.kept).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// What was read, and the cached tokens of all prompts if known.
    pub(crate) fn done(self) -> (Opened, Option<u32>) {
        (self.events, (self.missing == 0).then(|| self.cached_tokens.iter().sum()))
    }
}
