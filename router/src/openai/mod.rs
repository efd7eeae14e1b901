//! OpenAI's HTTP formats: requests in, answers out. Pure: bytes and values, no I/O.
//!
//! Every field of a request is honoured, documented to be ignored, accepted at its default value only, or refused by
//! name.

pub(crate) mod answer;
mod best;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completions;
mod echo;
pub(crate) mod error;
mod grammar;
pub(crate) mod logprobs;
mod parts;
pub(crate) mod responses;
pub(crate) mod sampling;
mod shapes;
pub(crate) mod stream;
pub(crate) mod tokenize;
mod tools;

#[cfg(test)]
mod tests;

pub(crate) use answer::{AnswerHead, Endpoint, PromptShown};
pub(crate) use common::{AnswerOptions, Common};
