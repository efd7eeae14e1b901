//! The etcd backend over a real etcd.

mod conforms;
mod faults;
mod tls;
mod view;
