//! The models of the cluster: by name, with their text.
//!
//! Workers own models. The router takes cards from records and fetches text bundles by digest from any worker that has
//! them.

mod bundle;
mod lookup;
mod text;
mod turns;

pub(crate) use bundle::TextCache;
pub(crate) use lookup::{Named, lookup};
pub(crate) use text::{ModelText, PromptBounds};
