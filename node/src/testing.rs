//! Parts for tests of other crates.
