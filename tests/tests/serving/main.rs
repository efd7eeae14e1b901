//! What clients of a cluster are answered, over both APIs and by real client libraries.

mod clients;
mod cluster_answers;
mod cluster_http;
mod draft_model;
mod page;
mod prefix_cache;
mod templates;
mod two_models;
