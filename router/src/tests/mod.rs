//! A real router against scripted workers: every test says what workers answer, event by event. Nothing sleeps to be right.

mod admin;
mod answers;
mod auth;
mod cache;
mod cached;
mod classes;
mod drain;
mod edges;
mod ends;
mod exact;
mod http;
mod intake;
mod limits;
mod port;
mod recovery;
mod remote;
mod retries;
mod room;
mod samples;
mod status;
mod traces;
