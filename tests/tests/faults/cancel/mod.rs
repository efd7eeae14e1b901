//! Cancels in every phase, by every way a client has; and what must hold afterwards: nothing leaks, nobody else notices.

mod clients;
mod overload;
mod phases;
mod pressure;
mod support;
