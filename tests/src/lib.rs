//! A whole cluster in one test process: real engines, real UCX, real gRPC and HTTP on loopback; only the processes are missing.
//!
//! Tests that need separate processes (kills, spans per service, `baton up`) start the binaries instead: see [`processes`].

#![allow(missing_docs, reason = "parts of one program: most names say what they hold")]

pub mod adapters;
pub mod bits;
pub mod chaos;
pub mod cluster;
pub mod critical_path;
pub mod eventually;
pub mod gates;
pub mod golden;
pub mod http;
pub mod jaeger;
pub mod kubernetes;
pub mod label_values;
pub mod load;
pub mod logs;
pub mod processes;
pub mod promised;
pub mod quiet;
pub mod scrape;
pub mod service;
pub mod skewed;
pub mod work;
