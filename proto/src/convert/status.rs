//! Request errors as gRPC statuses, and back: a router restores the typed error of a worker.
//!
//! The code is that of the documented table. Everything else is trailing metadata, which any client may ignore.

use baton_types::{ErrorKind, RequestError};
use std::error::Error as _;
use std::time::Duration;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

/// [`ErrorKind::name`]. Present only if a Baton process created the error.
pub const KIND: &str = "baton-error-kind";
/// Field of the request at fault, as UTF-8.
pub const PARAM: &str = "baton-error-param-bin";
/// Earliest time at which a retry makes sense, in milliseconds.
pub const RETRY_AFTER_MS: &str = "retry-after-ms";
/// The same for gRPC's own retry policy (gRFC A6).
pub const RETRY_PUSHBACK_MS: &str = "grpc-retry-pushback-ms";

/// Longest message sent: it is percent-encoded in a header, and some peers accept only 8 KiB of headers.
pub const MESSAGE_BYTES_MAX: usize = 1 << 10;
/// Longest field name sent.
pub const PARAM_BYTES_MAX: usize = 256;

/// The text of [`tonic::TimeoutExpired`], by which a timeout is recognized.
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

/// The error that a Baton process created; `None` if the status comes from a library, a proxy or a broken connection.
pub fn stated_error(status: &Status) -> Option<RequestError> {
    let kind = ErrorKind::from_name(status.metadata().get(KIND)?.to_str().ok()?)?;
    let param = status.metadata().get_bin(PARAM).and_then(|v| v.to_bytes().ok());
    let param = param.and_then(|bytes| String::from_utf8(bytes.into()).ok());
    let wait_ms = status.metadata().get(RETRY_AFTER_MS).and_then(|v| v.to_str().ok()?.parse().ok());
    let retry_after = wait_ms.map(Duration::from_millis);
    Some(RequestError { kind, message: status.message().into(), param, retry_after })
}

/// The error for any status. A status that no Baton process created and that wraps an error of the transport is
/// [`ErrorKind::Unavailable`]: the peer could not be reached, or disconnected.
pub fn to_error(status: &Status) -> RequestError {
    if let Some(error) = stated_error(status) {
        return error;
    }
    let kind = match status.code() {
        Code::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        // The answer of tonic's own timeout layer, on this side and on the peer's.
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
