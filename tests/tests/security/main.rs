//! Clients and peers that have no key, the wrong one, or want to harm.

mod client_tls;
mod hostile_clients;
mod keys;
mod rotation;
mod strangers;
