//! The one table of request errors: what a client sees over gRPC and over HTTP, and whether a retry can help.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Kinds of request errors. `grpc_code` and `http_status` are the documented table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request can never succeed as it is.
    InvalidRequest,
    /// The prompt and the requested output together exceed the context, so the request can never be served.
    ContextLengthExceeded,
    /// No such model in this cluster.
    ModelNotFound,
    /// The queue is full; retry after the given time.
    Overloaded,
    /// The deadline passed, or cannot be met.
    DeadlineExceeded,
    /// The client disconnected or cancelled.
    Cancelled,
    /// No live worker could serve this.
    Unavailable,
    /// The feature is not implemented.
    Unsupported,
    /// A bug or a failed component.
    Internal,
}

impl ErrorKind {
    /// Every kind, in the order of the documented table.
    pub const ALL: [Self; 9] = [
        Self::InvalidRequest,
        Self::ContextLengthExceeded,
        Self::ModelNotFound,
        Self::Overloaded,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::Unavailable,
        Self::Unsupported,
        Self::Internal,
    ];

    /// Numeric gRPC status code.
    pub const fn grpc_code(self) -> i32 {
        match self {
            Self::Cancelled => 1,
            Self::InvalidRequest => 3,
            Self::DeadlineExceeded => 4,
            Self::ModelNotFound => 5,
            Self::Overloaded => 8,
            Self::ContextLengthExceeded => 11,
            Self::Unsupported => 12,
            Self::Internal => 13,
            Self::Unavailable => 14,
        }
    }

    /// Status code of HTTP responses.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::InvalidRequest | Self::ContextLengthExceeded | Self::Unsupported => 400,
            Self::ModelNotFound => 404,
            Self::Overloaded => 429,
            Self::Cancelled => 499,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::DeadlineExceeded => 504,
        }
    }

    /// The kind that a worker's gRPC status code stands for; unknown codes are `Internal`.
    pub fn from_grpc_code(code: i32) -> Self {
        Self::ALL.into_iter().find(|k| k.grpc_code() == code).unwrap_or(Self::Internal)
    }

    /// Name on the wire, in logs and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::ModelNotFound => "model_not_found",
            Self::Overloaded => "overloaded",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::Unavailable => "unavailable",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal",
        }
    }

    /// The inverse of [`ErrorKind::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.name() == name)
    }

    /// OpenAI's `error.type` and `error.code`.
    pub const fn openai(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::InvalidRequest => ("invalid_request_error", None),
            Self::Unsupported => ("invalid_request_error", Some("unsupported_parameter")),
            Self::ContextLengthExceeded => ("invalid_request_error", Some("context_length_exceeded")),
            Self::ModelNotFound => ("invalid_request_error", Some("model_not_found")),
            Self::Overloaded => ("rate_limit_error", Some("overloaded")),
            Self::DeadlineExceeded => ("timeout_error", Some("deadline_exceeded")),
            Self::Cancelled => ("cancelled_error", Some("cancelled")),
            Self::Unavailable => ("service_unavailable_error", Some("unavailable")),
            Self::Internal => ("server_error", Some("internal_error")),
        }
    }
}

/// An error of one request. Its text is safe to show to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// Which row of the table.
    pub kind: ErrorKind,
    /// Says what is wrong and what to do.
    pub message: String,
    /// Field of the request at fault, if one is.
    pub param: Option<String>,
    /// Earliest time at which a retry makes sense.
    pub retry_after: Option<Duration>,
}

impl RequestError {
    /// An error of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after: None }
    }

    /// An invalid request, whose field `param` is wrong.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidRequest, message).param(param)
    }

    /// Names the field of the request at fault.
    #[must_use]
    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Adds the earliest time at which a retry makes sense.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl From<crate::SamplingError> for RequestError {
    fn from(error: crate::SamplingError) -> Self {
        Self::invalid(error.name, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_codes_name_one_kind_each() {
        for kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::from_grpc_code(kind.grpc_code()), kind);
            assert_eq!(ErrorKind::from_name(kind.name()), Some(kind));
        }
        assert_eq!(ErrorKind::from_grpc_code(2), ErrorKind::Internal);
    }
}
