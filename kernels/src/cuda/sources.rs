//! Which sources the kernels of this build are made of.

/// Digest of `kernels/cu`, as `cargo xtask codegen` writes it: files of kernels name the one that they were made of.
pub(super) fn digest() -> &'static str {
    include_str!("../../cu/sources.digest").trim_end()
}
