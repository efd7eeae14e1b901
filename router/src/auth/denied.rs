//! Why a call is not let in, over both fronts.

use crate::request::request_id;
use http::HeaderMap;
use tonic::Status;

/// A call that is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum Denied {
    /// No key came with it, or in no form that is known.
    #[error("an API key is needed: send the header `authorization: Bearer KEY`")]
    NoKey,
    /// A key that is nobody's.
    #[error("this API key is not known here: ask whoever runs this cluster for a key")]
    UnknownKey,
    /// The key of somebody who does not run the cluster.
    #[error("this API key may not run the cluster: it takes one that the keys file marks `operator`")]
    NotOperator,
    /// Nobody has a key, and operators have certificates.
    #[error(
        "operators are asked for here, and no key makes anybody one: call the cluster port with an operator's certificate (baton --identity FOLDER), or \
         set auth.keys_file"
    )]
    NoOperators,
}

impl Denied {
    /// Every reason.
    pub(crate) const ALL: [Self; 4] = [Self::NoKey, Self::UnknownKey, Self::NotOperator, Self::NoOperators];

    /// Name in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::NoKey => "no_key",
            Self::UnknownKey => "unknown_key",
            Self::NotOperator | Self::NoOperators => "not_operator",
        }
    }

    /// The answer over gRPC to a call with these headers, whose id it names.
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
