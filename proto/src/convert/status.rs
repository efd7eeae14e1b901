//! Request errors as gRPC statuses, and back: a router rebuilds the typed error of a worker.
//!
//! The code is the documented table's; the rest travels as trailing metadata, so that any client may ignore it.

use baton_types::{ErrorKind, RequestError};
use std::error::Error as _;
use std::time::Duration;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

/// [`ErrorKind::name`]. Present exactly where one of our processes stated the error.
pub const KIND: &str = "baton-error-kind";
/// Field of the request at fault, as UTF-8.
pub const PARAM: &str = "baton-error-param-bin";
/// Earliest sensible retry, in milliseconds.
pub const RETRY_AFTER_MS: &str = "retry-after-ms";
/// The same for gRPC's own retry policy (gRFC A6).
pub const RETRY_PUSHBACK_MS: &str = "grpc-retry-pushback-ms";

/// Longest message sent: it travels in a header, percent-encoded, and peers accept as little as 8 KiB of headers.
pub const MESSAGE_BYTES_MAX: usize = 1 << 10;
/// Longest field name sent.
pub const PARAM_BYTES_MAX: usize = 256;

/// `Display` of [`tonic::TimeoutExpired`].
const TIMEOUT_MESSAGE: &str = "Timeout expired";

/// The status that carries this error.
pub fn from_error(error: &RequestError) -> Status {
    let mut metadata = MetadataMap::new();
    metadata.insert(KIND, MetadataValue::from_static(error.kind.name()));
    if let Some(param) = &error.param {
        metadata.insert_bin(PARAM, MetadataValue::from_bytes(cut(param, PARAM_BYTES_MAX).as_bytes()));
    }
    if let Some(wait) = error.retry_after {
        let ms = MetadataValue::from(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        metadata.insert(RETRY_AFTER_MS, ms.clone());
        metadata.insert(RETRY_PUSHBACK_MS, ms);
    }
    Status::with_metadata(Code::from_i32(error.kind.grpc_code()), cut(&error.message, MESSAGE_BYTES_MAX), metadata)
}

/// The error that a process of ours stated; `None` where the status comes from a library, a proxy or a broken connection.
pub fn stated_error(status: &Status) -> Option<RequestError> {
    let kind = ErrorKind::from_name(status.metadata().get(KIND)?.to_str().ok()?)?;
    let param = status.metadata().get_bin(PARAM).and_then(|v| v.to_bytes().ok());
    let param = param.and_then(|bytes| String::from_utf8(bytes.into()).ok());
    let wait_ms = status.metadata().get(RETRY_AFTER_MS).and_then(|v| v.to_str().ok()?.parse().ok());
    let retry_after = wait_ms.map(Duration::from_millis);
    Some(RequestError { kind, message: status.message().into(), param, retry_after })
}

/// The error behind any status. A status that no process of ours stated and that wraps an error of the transport is
/// [`ErrorKind::Unavailable`]: the peer could not be reached, or went away.
pub fn to_error(status: &Status) -> RequestError {
    if let Some(error) = stated_error(status) {
        return error;
    }
    let kind = match status.code() {
        Code::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        // How tonic's own timeout layer answers, on this side and on the peer's.
        Code::Cancelled if timed_out(status) || status.message() == TIMEOUT_MESSAGE => ErrorKind::DeadlineExceeded,
        _ if status.source().is_some() => ErrorKind::Unavailable,
        code => ErrorKind::from_grpc_code(code as i32),
    };
    RequestError::new(kind, status.message())
}

fn timed_out(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<tonic::TimeoutExpired>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// The longest prefix of at most `bytes_max` bytes that ends at a character.
fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}
