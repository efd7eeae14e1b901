//! Requests that end early, and processes, links and versions that fail under load: nothing leaks, and no answer is wrong.

mod cancel;
mod chaos;
mod connections;
mod drain;
mod recovery;
mod skew;
