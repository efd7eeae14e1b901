//! Anthropic's HTTP formats: requests in, answers out. Pure: bytes and values, no I/O.
//!
//! A request becomes what the same chat of OpenAI's API becomes: messages, tools in OpenAI's form, and parameters.

mod blocks;
pub(crate) mod error;
mod message;
mod request;
mod stream;
#[cfg(test)]
mod tests;
mod tools;

pub(crate) use message::MessageForm;
pub(crate) use request::{MESSAGES, parse, parse_counted};
