//! A router's gRPC services as the commands use them, in types of the command line: protobuf types stop here.

mod admin;
mod inference;

pub(crate) use admin::{Admin, DrainEvent, Drained};
pub(crate) use inference::{Last, Message, Options, Prompt, Question};
