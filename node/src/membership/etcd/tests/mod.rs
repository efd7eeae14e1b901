//! The etcd backend over a real etcd.

mod conforms;
mod faults;
mod growth;
mod nodes;
mod offline_start;
mod prefix;
mod records;
mod space;
mod support;
mod tls;
mod view;
