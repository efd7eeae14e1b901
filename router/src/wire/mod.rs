//! JSON of requests and answers over HTTP, whatever the API: fields of bodies, parts of answers, events of streams. Pure.

mod chat;
mod ended;
mod event;
pub(crate) mod fields;
mod form;
pub(crate) mod json;
mod parts;
pub(crate) mod serialize;
pub(crate) mod tools;
mod unknown;

pub(crate) use chat::Chat;
pub(crate) use ended::{Ended, Spent};
pub(crate) use event::{event, named_event};
pub(crate) use form::{Form, StreamForm};
pub(crate) use parts::{Parts, PartsReader};
pub(crate) use unknown::Unknown;
