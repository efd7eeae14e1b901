//! Identifiers. Each is a newtype, so that a ticket is never passed where a block is expected.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Id of a token in the vocabulary of one model.
pub type TokenId = u32;

/// Index of a block within one group of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockId(pub u32);

/// Random name of one offered put or get between two incarnations. The side that receives the offer draws it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TicketId(pub u64);

/// One process start of an instance. An offer names the incarnations of both sides, and the receiver refuses it unless they are the two
/// that are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

macro_rules! hex_display {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }
    )*};
}
hex_display!(TicketId, Incarnation);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A name given by a user or an operator was empty, too long or not printable ASCII.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be 1 to {bytes_max} printable ASCII characters without spaces, got {got:?}")]
pub struct NameError {
    what: &'static str,
    bytes_max: usize,
    got: String,
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Longest accepted name, in bytes.
            pub const BYTES_MAX: usize = $max;

            /// Checks and wraps a name.
            pub fn try_new(name: impl Into<String>) -> Result<Self, NameError> {
                let name = name.into();
                if name.is_empty() || name.len() > $max || !name.bytes().all(|b| b.is_ascii_graphic()) {
                    let got = name.chars().take(64).collect();
                    return Err(NameError { what: $what, bytes_max: $max, got });
                }
                Ok(Self(name))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(name: String) -> Result<Self, NameError> {
                Self::try_new(name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
name!(
    /// Name of one instance (one worker process, or one set of shards) in its cluster.
    InstanceId, "an instance id", 128
);
name!(
    /// Name of one request, from the client's `x-request-id` or drawn by the router.
    RequestId, "a request id", 128
);
name!(
    /// Name of the tenant that an API key belongs to. Shorter than a SHA-256 in hex, so that a hash in the wrong field is refused.
    TenantId, "a tenant", 63
);

impl Default for TenantId {
    /// The tenant of every request, if no keys are configured.
    fn default() -> Self {
        Self("default".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(RequestId::try_new("req-1").is_ok());
        for bad in ["", "two words", "tab\t", "naïve", &"x".repeat(129)] {
            let error = RequestId::try_new(bad).unwrap_err();
            assert!(error.to_string().starts_with("a request id must be"), "{error}");
        }
        let everybody = TenantId::default();
        assert_eq!(TenantId::try_new(everybody.as_str()), Ok(everybody));
        assert!(TenantId::try_new("ab".repeat(32)).is_err(), "a hash is no tenant");
    }
}
