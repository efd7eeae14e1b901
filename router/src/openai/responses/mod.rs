//! `POST /v1/responses`, without a store: a request is a chat, whose answer is items.

mod answer;
mod events;
mod input;
mod items;
mod request;
mod stream;
#[cfg(test)]
mod tests;

pub(crate) use answer::ResponseForm;
pub(crate) use request::{RESPONSES, parse};
