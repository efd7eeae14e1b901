//! Gets: a reader requests blocks from an owner. The owner pins them for a bounded time, and either writes them to the reader or lets the
//! reader read them.

mod owner;
mod reader;
mod request;

pub(crate) use owner::Owner;
pub(crate) use reader::Reader;
pub use request::{GetOutcome, GetReport, GetRequest};
