//! Text in, token ids out, and back: tokenizer, chat template, incremental detokenizer, stop strings, the parts
//! of answers, and grammars.
//!
//! Layer: between a request's text and the engine's token ids. Workers make a [`TextBundle`] from their model files with
//! [`bundle`]; routers fetch it by digest and serve it with [`Tokenizer`], [`ChatTemplate`], [`Detokenizer`] and [`StopMatcher`].
//!
//! Invariant: text of the user never becomes a control token. A [`Prompt`] is one text with a list of the spans that are control
//! tokens. Only those spans yield control ids; the same spelling elsewhere is ordinary characters. The text is tokenized whole, so that
//! the borders between template and content are pre-tokenized as in training.
//!
//! This crate uses no network, no clock (the caller gives the time), no async runtime and no numeric kernel.

pub mod answer;
pub mod bundle;
pub mod chat;
pub mod grammar;

mod detokenizer;
mod error;
mod prompt;
mod stop;
pub mod tokenizer;

pub use baton_types::TextBundle;
pub use chat::{ChatRequest, ChatTemplate, Content, Ending, Message, Role};

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use prompt::{ControlSpan, Prompt};
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, Stop, StopMatcher};
pub use tokenizer::{Specials, Tokenizer};
