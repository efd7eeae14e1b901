//! OpenAI's HTTP shapes: requests in, answers out. Pure: bytes and values, no I/O.
//!
//! Every field of a request is honoured, documented to be ignored, accepted at its default value only, or refused by name.

pub mod answer;
pub mod chat;
pub mod common;
pub mod completions;
pub mod fields;
pub mod logprobs;

#[cfg(test)]
mod tests;

pub use answer::{AnswerHead, Endpoint};
pub use common::{AnswerOptions, Common};
