//! Tests of the sampler.
