//! The two generating endpoints.

use super::{HttpState, error, headers, sse};
use crate::auth::Caller;
use crate::flow::Generation;
use crate::openai::{AnswerHead, Common, Endpoint, chat as chat_request, completions as completions_request};
use crate::output::{Opening, cache_hit_percent};
use crate::request::{GenerationRequest, Prompt};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_types::{ErrorKind, RequestError, RequestId, TenantId};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::time::{timeout, timeout_at};

pub(super) async fn chat(state: State<HttpState>, caller: Extension<Caller>, request: Request) -> Response {
    answer(state.0, caller.0, request, Endpoint::Chat).await
}

pub(super) async fn completions(state: State<HttpState>, caller: Extension<Caller>, request: Request) -> Response {
    answer(state.0, caller.0, request, Endpoint::Completions).await
}

/// What a request brings besides its body.
struct Head {
    id: RequestId,
    tenant: TenantId,
    headers: HeaderMap,
    received: Instant,
    deadline: Instant,
}

async fn answer(state: HttpState, caller: Caller, request: Request, endpoint: Endpoint) -> Response {
    let received = Instant::now();
    let headers = request.headers().clone();
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
            let head = Head { id: id.clone(), tenant: caller.tenant, headers, received, deadline };
            answer_within(&state, request, endpoint, head).await
        }
    };
    headers::add_id(response, &id)
}

/// The deadline holds from the first byte on: a client that sends its body slowly waits no longer than one that gets no answer.
async fn answer_within(state: &HttpState, request: Request, endpoint: Endpoint, head: Head) -> Response {
    let body: Result<Bytes, BytesRejection> =
        match timeout_at(head.deadline.into(), Bytes::from_request(request, state)).await {
            Ok(body) => body,
            Err(_) => {
                let message = "the deadline passed before the whole body had come";
                return error::response(&RequestError::new(ErrorKind::DeadlineExceeded, message));
            }
        };
    match body {
        Err(rejection) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body is over the limit of {} bytes", state.body_bytes_max);
            error::plain(StatusCode::PAYLOAD_TOO_LARGE, &message, "request_too_large")
        }
        Err(_) => error::plain(StatusCode::BAD_REQUEST, "the body could not be read", "unreadable_body"),
        Ok(body) => generate(state, &body, endpoint, head).await,
    }
}

async fn generate(state: &HttpState, body: &[u8], endpoint: Endpoint, head: Head) -> Response {
    let parsed = match endpoint {
        Endpoint::Chat => chat_request::parse(body),
        Endpoint::Completions => completions_request::parse(body),
    };
    let (prompt, common) = match parsed {
        Ok(parsed) => parsed,
        Err(e) => return error::response(&e),
    };
    let options = common.options.clone();
    let (response, trace_id) = match state.core.generate(request(prompt, common, head)).await {
        Err(refused) => (Err(refused.error), refused.trace_id),
        Ok(mut generation) => {
            let trace_id = std::mem::take(&mut generation.trace_id);
            (respond(state, answer_head(endpoint, options, &generation), generation).await, trace_id)
        }
    };
    headers::add_trace(response.unwrap_or_else(|e| error::response(&e)), &trace_id)
}

async fn respond(state: &HttpState, head: AnswerHead, mut generation: Generation) -> Result<Response, RequestError> {
    let prompt_tokens = generation.prompt_tokens.len();
    if !head.options.stream {
        let (samples, total) = generation.events.whole().await?;
        let percent = cache_hit_percent(total.usage.cached_tokens, prompt_tokens);
        return Ok(headers::add_cache_hit(Json(head.whole(&samples, &total)).into_response(), percent));
    }
    // An error before the first token still gets its status; a long queue gets an open stream with keepalives instead.
    let mut opening = Opening::new(generation.samples);
    if let Ok(read) = timeout(state.sse_keepalive, opening.read(&mut generation.events)).await {
        read?;
    }
    let (first, cached_tokens) = opening.done();
    let response = sse::response(head, first, generation.events, state.sse_keepalive);
    // A stream that opens before it is known says nothing of it, rather than what may not be so.
    Ok(match cached_tokens {
        Some(cached) => headers::add_cache_hit(response, cache_hit_percent(cached, prompt_tokens)),
        None => response,
    })
}

fn request(prompt: Prompt, common: Common, head: Head) -> GenerationRequest {
    let Common { model, sampling, samples, stop, prefill_policy, priority, cache, options: _ } = common;
    let Head { id, tenant, headers, received, deadline } = head;
    GenerationRequest {
        id,
        tenant,
        model,
        prompt,
        sampling,
        samples,
        stop,
        prefill_policy,
        priority,
        cache,
        deadline,
        headers,
        received,
    }
}

fn answer_head(endpoint: Endpoint, options: crate::openai::AnswerOptions, generation: &Generation) -> AnswerHead {
    let prefix = match endpoint {
        Endpoint::Chat => "chatcmpl",
        Endpoint::Completions => "cmpl",
    };
    let text = generation.model.text.clone();
    AnswerHead {
        endpoint,
        id: format!("{prefix}-{}", generation.id),
        model: generation.model.card.id.clone(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        prompt_token_ids: if options.return_token_ids { generation.prompt_tokens.to_vec() } else { Vec::new() },
        options,
        samples: generation.samples,
        seed: generation.seed,
        token_text: Arc::new(move |token| text.as_ref()?.token_bytes(token)),
    }
}
