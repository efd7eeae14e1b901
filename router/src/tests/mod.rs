//! A real router with scripted workers: every test scripts the workers' answers, event by event. No test depends on
//! sleeping.

mod admin;
mod answers;
mod auth;
mod budget;
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
mod page;
mod port;
mod recovery;
mod remote;
mod retries;
mod samples;
mod status;
mod tenants;
mod traces;
