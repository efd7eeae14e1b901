//! Text in, token ids out, and back: tokenizer, chat template, incremental detokenizer and stop strings.
//!
//! Place in the house: between a request's text and the engine's token ids. Workers make a [`TextBundle`] from their model files with
//! [`bundle`]; routers fetch it by digest and serve it with [`Tokenizer`], [`ChatTemplate`], [`Detokenizer`] and [`StopMatcher`].
//!
//! The promise kept here: text of the user never becomes a control token. A [`Prompt`] is one whole text with a list of the spans that
//! are control tokens; only those spans may yield control ids, wherever else the same spelling stands it is ordinary characters. The
//! text is tokenized whole, so that the borders between template and content are pre-tokenized as in training.
//!
//! This crate must never know a network, a clock (the caller gives the time), an async runtime or a numeric kernel.

pub mod bundle;
pub mod chat;

mod detokenizer;
mod error;
mod prompt;
mod stop;
pub mod tokenizer;

pub use baton_types::TextBundle;
pub use chat::{ChatRequest, ChatTemplate, Content, Message, Role};

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use prompt::{ControlSpan, Prompt};
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, Stop, StopMatcher};
pub use tokenizer::{Specials, Tokenizer};
