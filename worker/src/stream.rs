//! From the engine thread to an async stream: a bounded channel. A slow reader pauses its sequence.

use baton_engine::api::{SequenceEvent, SequenceSink};
use tokio::sync::mpsc;

/// Events that one stream may hold before its sequence is paused. A few tokens absorb the reader's scheduling delays; more would only
/// delay the detection of a stall.
pub const EVENTS_MAX: usize = 64;

/// The engine's end. Clones feed the same stream.
#[derive(Clone, Debug)]
pub struct StreamSink(mpsc::Sender<SequenceEvent>);

/// Makes a connected pair.
pub fn channel() -> (StreamSink, mpsc::Receiver<SequenceEvent>) {
    let (sender, receiver) = mpsc::channel(EVENTS_MAX);
    (StreamSink(sender), receiver)
}

impl StreamSink {
    /// Sends the reader an end that happened before the engine had the sequence. A full or closed stream receives nothing.
    pub fn fail(&self, kind: baton_types::ErrorKind, message: impl Into<String>) {
        let _ = self.0.try_send(SequenceEvent::Failed { kind, message: message.into() });
    }
}

impl SequenceSink for StreamSink {
    fn has_room(&self, events: usize) -> bool {
        // A closed stream counts as having room: the next event shows the engine that the reader has gone.
        self.0.is_closed() || self.0.capacity() >= events
    }

    fn send(&mut self, event: SequenceEvent) -> bool {
        self.0.try_send(event).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{ErrorKind, FinishReason};
    use std::time::Instant;

    #[test]
    fn a_slow_reader_takes_the_room_and_a_gone_one_ends_the_sequence() {
        let (mut sink, mut receiver) = channel();
        let started = || SequenceEvent::Started { at: Instant::now() };
        let sent = (0..2 * EVENTS_MAX).take_while(|_| sink.has_room(2) && sink.send(started())).count();
        assert_eq!(sent, EVENTS_MAX - 1);
        assert!(receiver.try_recv().is_ok() && sink.has_room(2));
        drop(receiver);
        assert!(sink.has_room(2) && !sink.send(SequenceEvent::Finished { reason: FinishReason::Stop }));
        sink.fail(ErrorKind::Internal, "nobody hears");
    }
}
