//! Fallible conversions between protobuf and [`baton_types`], and between request errors and gRPC statuses.
//!
//! Data from the wire is untrusted until `try_from` has accepted it here: names are checked, lists are bounded, enums are known, ranges
//! are ordered. A refusal names the field, as a path: `card.served_names[3]`.

mod adapters;
mod error;
mod events;
mod record;
mod report;
mod sampling;
mod sequence;
pub mod status;
pub mod stored;

#[cfg(test)]
mod tests;

pub use error::{ConvertError, required};
pub use record::{
    ADDRESS_BYTES_MAX, CAPABILITIES_MAX, END_TOKENS_MAX, LABELS_MAX, LAYOUT_BYTES_MAX, NAME_BYTES_MAX,
    SERVED_NAMES_MAX, SHARDS_MAX, checked_card,
};
pub use report::{finish_reason, finish_reason_code};
pub use sampling::{grammar, logit_bias};
pub use sequence::TOKENS_MAX;
