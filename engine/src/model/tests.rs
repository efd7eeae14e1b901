//! Tests of the forward pass.
