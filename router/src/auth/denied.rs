//! Why a call is refused for its key, over HTTP and gRPC.

use crate::request::request_id;
use http::HeaderMap;
use tonic::Status;

/// A call that is refused for its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum Denied {
    /// No key came with it, or not in a known form.
    #[error("an API key is needed: send one in the header `authorization: Bearer KEY` or `x-api-key: KEY`")]
    NoKey,
    /// No entry of the file has this key.
    #[error("this API key is unknown: ask the operator of this cluster for a key")]
    UnknownKey,
    /// The key of a caller that is not an operator.
    #[error("this API key may not run the cluster: it takes one that the keys file marks `operator`")]
    NotOperator,
    /// The router has no keys, and operators have certificates.
    #[error(
        "operators are asked for here, and no key makes anybody one: call the cluster port with an operator's certificate (baton --identity FOLDER), or \
         set auth.keys_file"
    )]
    NoOperators,
}

impl Denied {
    pub(crate) const ALL: [Self; 4] = [Self::NoKey, Self::UnknownKey, Self::NotOperator, Self::NoOperators];

    /// Value of the label in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::NoKey => "no_key",
            Self::UnknownKey => "unknown_key",
            Self::NotOperator | Self::NoOperators => "not_operator",
        }
    }

    /// The gRPC answer to a call with these headers; it names the call's id.
    pub(crate) fn status(self, headers: &HeaderMap) -> Status {
        let mut status = match self {
            Self::NoKey | Self::UnknownKey | Self::NoOperators => Status::unauthenticated(self.to_string()),
            Self::NotOperator => Status::permission_denied(self.to_string()),
        };
        let given = headers.get("x-request-id").and_then(|v| v.to_str().ok());
        if let Ok(id) = request_id(given, "x-request-id").0.as_str().parse() {
            status.metadata_mut().insert("x-request-id", id);
        }
        status
    }
}
