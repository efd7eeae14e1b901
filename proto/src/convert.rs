//! Fallible conversions between protobuf and `baton_types`.
