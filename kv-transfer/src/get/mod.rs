//! Gets: a reader asks an owner for blocks, which pins them for a bounded time and writes them, or lets them be read.

mod handle;
mod owner;
mod reader;
mod request;

pub use handle::GetHandle;
pub(crate) use owner::Owner;
pub(crate) use reader::Reader;
pub use request::{GetOutcome, GetReport, GetRequest};
