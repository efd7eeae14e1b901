//! What the HTTP front needs of each API to send an answer.

use crate::output::{Choices, Delta, Finished, Total};
use baton_node::intake::Hold;
use baton_types::RequestError;
use serde::Serialize;

/// How an API writes one answer: in one body, or as the events of a stream.
pub(crate) trait Form: Send + 'static {
    type Stream: StreamForm;

    /// Whether the client asked for a stream.
    fn is_stream(&self) -> bool;
    /// How its choices are counted.
    fn choices(&self) -> Choices;
    /// Tokens of all prompts.
    fn prompt_tokens(&self) -> usize;

    /// Bytes of the head of a stream that are kept and written for each prompt token, in all.
    fn opening_bytes(&self) -> u64 {
        0
    }

    /// Bytes of a whole answer that are known before it is generated: an upper bound of all but the
    /// [`Form::bytes_of`] its deltas.
    fn bytes_before(&self) -> u64;
    /// An upper bound of the bytes that a delta adds to a whole answer.
    fn bytes_of(&self, delta: &Delta) -> u64;
    /// The whole answer in one body.
    fn whole<'a>(&'a self, samples: &'a [(Delta, Finished)], total: &'a Total) -> impl Serialize + 'a;

    /// The answer as a stream. `cached_tokens` of the prompt, if they are known. What the form keeps of the answer until
    /// its end takes memory of `kept`.
    fn stream(self, cached_tokens: Option<u32>, kept: Hold) -> Self::Stream;
}

/// Writes the events of one answer. After an error, what was written of an event is taken back.
pub(crate) trait StreamForm: Send + Unpin + 'static {
    /// What is sent while there is nothing to say.
    const KEEPALIVE: &'static [u8];

    /// How many samples the answer has.
    fn samples(&self) -> u32;
    /// What opens a sample.
    fn opening(&mut self, sample: u32, to: &mut Vec<u8>) -> Result<(), RequestError>;
    /// More of a sample; nothing if the client sees nothing new.
    fn delta(&mut self, delta: &Delta, to: &mut Vec<u8>) -> Result<(), RequestError>;
    /// The end of a sample; with the last one, of the stream.
    fn finished(&mut self, finished: &Finished, to: &mut Vec<u8>) -> Result<(), RequestError>;
    /// The last event of a stream that fails.
    fn error(&mut self, error: &RequestError, to: &mut Vec<u8>);
}
