//! Complete answers: gathered within the memory budget, serialized once, and held until they were sent.

use super::{headers, long};
use crate::flow::Generation;
use crate::output::{Gathered, cache_hit_percent, no_room};
use crate::wire::{Form, serialize};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use baton_node::intake::Hold;
use baton_types::RequestError;
use serde_json::Value;

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
    let body = long::run(whole.written, move || write(&form, whole)).await?;
    Ok(headers::add_cache_hit(json(body), percent))
}

/// An answer that is one value. `hold` counts at least its tokens, then its text until it was sent.
pub(super) async fn value(
    mut hold: Hold,
    make: impl FnOnce() -> Value + Send + 'static,
) -> Result<Response, RequestError> {
    let body = long::run(hold.bytes(), move || {
        let answer = make();
        let length = serialize::length(&answer);
        // The value's own texts are no longer than what is written of them.
        hold.set(hold.bytes().max(2 * length)).map_err(no_room)?;
        let json = serialize::write(&answer, length)?;
        drop(answer);
        held(json, hold)
    });
    Ok(json(body.await?))
}

fn json(body: Bytes) -> Response {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
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
    held(json, hold)
}

/// The body of a written answer, when all that it was made of is gone.
fn held(json: Vec<u8>, mut hold: Hold) -> Result<Bytes, RequestError> {
    hold.set(json.capacity() as u64).map_err(no_room)?;
    Ok(Bytes::from_owner(HeldBody { json, _hold: hold }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::intake::{Client, Intake};
    use baton_types::ErrorKind;
    use serde_json::json;
    use std::net::Ipv4Addr;

    #[tokio::test]
    async fn a_value_is_counted_until_it_was_sent() {
        let intake = |bytes_max| Intake::new(bytes_max, bytes_max);
        let hold = |intake: &Intake| intake.hold(Client::at(Ipv4Addr::LOCALHOST.into()));
        for length in [1_000, 1_000_000] {
            let text = move || json!("x".repeat(length));
            let room = intake(1 << 22);
            let response = value(hold(&room), text).await.unwrap();
            assert_eq!(room.used(), length as u64 + 2);
            drop(response);
            assert_eq!(room.used(), 0);
            let no_room = intake(length as u64);
            let error = value(hold(&no_room), text).await.unwrap_err();
            assert_eq!((error.kind, no_room.used()), (ErrorKind::Overloaded, 0));
        }
    }
}
