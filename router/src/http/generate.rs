//! The two generating endpoints.

use super::body::{self, BodyError};
use super::{HttpState, error, headers, sse, whole};
use crate::auth::Caller;
use crate::config::READING_COSTS;
use crate::flow::{Generation, Prepared};
use crate::openai::{
    AnswerHead, AnswerOptions, Common, Endpoint, Parts as AnswerParts, chat as chat_request,
    completions as completions_request,
};
use crate::output::{Opening, cache_hit_percent};
use crate::request::{Prompt, Request, Tools};
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use baton_node::intake::{Client, Hold};
use baton_text::answer::AnswerParser;
use baton_types::{ErrorKind, RequestError, RequestId};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::time::timeout;

type Call = axum::extract::Request;

pub(super) async fn chat(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, Endpoint::Chat).await
}

pub(super) async fn completions(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, Endpoint::Completions).await
}

/// Larger bodies are parsed off the threads that serve connections: it takes milliseconds.
const LONG_BODY_BYTES: usize = 256 << 10;

/// Memory of one prompt token id in a streamed answer that returns the ids: the id, and its digits as they are written,
/// kept and sent.
const ID_COSTS: u64 = 25;

/// The request without its body.
struct Head {
    id: RequestId,
    caller: Caller,
    /// The client whose shares its body and answer use.
    client: Client,
    headers: HeaderMap,
    received: Instant,
    deadline: Instant,
}

async fn answer(state: HttpState, caller: Caller, call: Call, endpoint: Endpoint) -> Response {
    let received = state.core.runtime.now();
    let (Parts { headers, extensions, .. }, body) = call.into_parts();
    let (id, given) = headers::id(&headers);
    let deadline = given.and_then(|()| headers::deadline(&headers, state.deadlines, received));
    let response = match deadline {
        _ if !headers::is_json(&headers) => {
            let message = "the body must be JSON: set content-type: application/json";
            error::plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
        }
        _ if !headers::is_plain(&headers) => {
            let message = "the body must not be compressed: send it without content-encoding";
            error::plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
        }
        Err(e) => error::response(&e),
        Ok(deadline) => {
            let client = caller.client(&extensions);
            let head = Head { id: id.clone(), caller, client, headers, received, deadline };
            answer_within(&state, body, endpoint, head).await
        }
    };
    headers::add_id(response, &id)
}

/// The deadline counts from the first byte: a client that sends its body slowly waits no longer than one that gets no
/// answer. The body's memory is held until it is tokenized.
async fn answer_within(state: &HttpState, body: Body, endpoint: Endpoint, head: Head) -> Response {
    let mut hold = state.core.intake.hold(head.client.clone());
    match body::read(body, state.body, head.received, head.deadline, &mut hold).await {
        Ok(body) => generate(state, body, endpoint, head, hold).await,
        Err(BodyError::TooLarge) => {
            let message = format!("the body is over the limit of {} bytes", state.body.bytes_max);
            error::plain(StatusCode::PAYLOAD_TOO_LARGE, &message, "request_too_large")
        }
        Err(BodyError::Full(full)) => error::response(&full.into()),
        Err(BodyError::Slow) => {
            let message = format!("the body was not complete within {:?}; send it faster", state.body.time_max);
            error::plain(StatusCode::REQUEST_TIMEOUT, &message, "body_timeout")
        }
        Err(BodyError::Deadline) => {
            let message = "the deadline passed before the whole body had come";
            error::response(&RequestError::new(ErrorKind::DeadlineExceeded, message))
        }
        Err(BodyError::Unreadable) => {
            error::plain(StatusCode::BAD_REQUEST, "the body could not be read", "unreadable_body")
        }
    }
}

/// Parses a body as a request; a long one off the threads that serve connections. The hold then counts the parsed
/// request instead of the body.
async fn parse(body: Vec<u8>, endpoint: Endpoint, mut hold: Hold) -> Result<((Prompt, Common), Hold), RequestError> {
    hold.set(body.len() as u64 * READING_COSTS)?;
    let long = body.len() > LONG_BODY_BYTES;
    let parse = move || {
        let parsed = match endpoint {
            Endpoint::Chat => chat_request::parse(&body),
            Endpoint::Completions => completions_request::parse(&body),
        }?;
        drop(body);
        // It needs no more memory than parsing it.
        let held = hold.bytes();
        hold.set((parsed.0.bytes() + parsed.1.parameters.model.len() as u64).min(held))?;
        Ok((parsed, hold))
    };
    if !long {
        return parse();
    }
    let failed = |_| RequestError::new(ErrorKind::Internal, "the router failed to read the body; send it again");
    tokio::task::spawn_blocking(parse).await.map_err(failed)?
}

async fn generate(state: &HttpState, body: Vec<u8>, endpoint: Endpoint, head: Head, hold: Hold) -> Response {
    let ((prompt, common), hold) = match parse(body, endpoint, hold).await {
        Ok(parsed) => parsed,
        Err(e) => return error::response(&e),
    };
    if state.strict_fields
        && let Err(e) = common.check_strictly()
    {
        return error::response(&e);
    }
    let Common { parameters, options, unknown } = common;
    state.core.metrics.ignored_fields(unknown.len());
    let Head { id, caller, client, headers, received, deadline } = head;
    let Caller { tenant, weight, key, .. } = caller;
    let request = Request { id, tenant, weight, key, received, deadline, parameters };
    let generation = state.core.generate(request, prompt, &headers).await;
    drop(hold);
    let (response, trace_id) = match generation {
        Err(refused) => (Err(refused.error), refused.trace_id),
        Ok(mut generation) => {
            let trace_id = std::mem::take(&mut generation.trace_id);
            let room = state.core.answers.hold(client);
            (respond(state, answer_head(endpoint, options, &generation.request), generation, room).await, trace_id)
        }
    };
    let response = headers::add_ignored(response.unwrap_or_else(|e| error::response(&e)), &unknown);
    headers::add_trace(response, &trace_id)
}

async fn respond(
    state: &HttpState,
    head: AnswerHead,
    mut generation: Generation,
    room: Hold,
) -> Result<Response, RequestError> {
    if !head.options.stream {
        return whole::response(head, generation, room).await;
    }
    let prompt_tokens = head.prompt_tokens;
    // An error before the first token still gets its status code. After a long queue the client gets an open stream
    // with keepalives instead. Prompt token ids are kept and written once, before a client reads any of them.
    let head_bytes = if head.options.return_token_ids { prompt_tokens as u64 * ID_COSTS } else { 0 };
    let mut opening = Opening::new(head.samples, &generation.events, head_bytes, room)?;
    if let Ok(read) = timeout(state.sse_keepalive, opening.read(&mut generation.events)).await {
        read?;
    }
    let (first, cached_tokens) = opening.done();
    let response = sse::response(head, first, generation.events, state.sse_keepalive);
    // A stream that opens before the cached share is known does not report it.
    Ok(match cached_tokens {
        Some(cached) => headers::add_cache_hit(response, cache_hit_percent(cached, prompt_tokens)),
        None => response,
    })
}

fn answer_head(endpoint: Endpoint, options: AnswerOptions, request: &Prepared) -> AnswerHead {
    let prefix = match endpoint {
        Endpoint::Chat => "chatcmpl",
        Endpoint::Completions => "cmpl",
    };
    let text = request.model.text.clone();
    let parts = text.as_ref().filter(|_| endpoint == Endpoint::Chat).and_then(|text| {
        let format = text.answer_format()?;
        let tools = request.tools.as_ref().map_or_else(Arc::default, Tools::names);
        let parser = AnswerParser::new(format, tools, &text.tail(&request.tokens));
        (!parser.is_plain()).then_some(AnswerParts { parser, format: format.calls })
    });
    AnswerHead {
        endpoint,
        id: format!("{prefix}-{}", request.id),
        model: request.model.card.id.clone(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        prompt_token_ids: if options.return_token_ids { request.tokens.clone() } else { Arc::default() },
        options,
        prompt_tokens: request.tokens.len(),
        samples: request.samples,
        seed: request.sampling.seed,
        parts,
        token_text: Arc::new(move |token| text.as_ref()?.token_bytes(token)),
    }
}
