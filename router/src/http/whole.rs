//! A complete answer: gathered within the memory budget, serialized once, and held until it was sent.

use super::headers;
use crate::flow::Generation;
use crate::output::{Gathered, cache_hit_percent, no_room};
use crate::wire::{Form, serialize};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use baton_node::intake::Hold;
use baton_types::{ErrorKind, RequestError};

/// Larger answers are serialized off the threads that serve connections: it takes milliseconds.
const LONG_ANSWER_BYTES: u64 = 256 << 10;

/// A body and its hold on the budget: both live until the body is written to the connection.
struct HeldBody {
    json: Vec<u8>,
    _hold: Hold,
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// The answer, once it is complete. If the budget has no room, its generation is dropped.
pub(super) async fn response(form: impl Form, generation: Generation, hold: Hold) -> Result<Response, RequestError> {
    let (prompt_tokens, events) = (form.prompt_tokens(), generation.events);
    let whole = events.gather(hold, form.bytes_before(), |delta| form.bytes_of(delta)).await?;
    let percent = cache_hit_percent(whole.total.usage.cached_tokens, prompt_tokens);
    let body = if whole.written <= LONG_ANSWER_BYTES {
        write(&form, whole)?
    } else {
        let failed = |_| RequestError::new(ErrorKind::Internal, "the answer could not be written");
        tokio::task::spawn_blocking(move || write(&form, whole)).await.map_err(failed)??
    };
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(headers::add_cache_hit(response, percent))
}

fn write(form: &impl Form, whole: Gathered) -> Result<Bytes, RequestError> {
    let Gathered { samples, total, mut hold, written } = whole;
    let answer = form.whole(&samples, &total);
    let length = serialize::length(&answer);
    debug_assert!(length <= written, "{length} bytes where {written} were counted");
    hold.grow(length.saturating_sub(written)).map_err(no_room)?;
    let json = serialize::write(&answer, length)?;
    drop(answer);
    drop(samples);
    hold.set(json.capacity() as u64).map_err(no_room)?;
    Ok(Bytes::from_owner(HeldBody { json, _hold: hold }))
}
