//! The wire: protobuf messages and services of `baton.v1`, their fallible conversions to [`baton_types`], and those of
//! the KServe protocol.
//!
//! Layer: above `types`, below `node`. Protobuf types end at [`convert`]: the code behind a service uses `types`.

/// Package `baton.v1`, written by `cargo codegen` from the files in `proto/`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod v1 {
    include!("generated/baton.v1.rs");
}

/// Package `inference`, the KServe v2 protocol.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod kserve {
    include!("generated/inference.rs");
}

pub mod convert;

/// Encoded file descriptors, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("generated/descriptors.bin");
