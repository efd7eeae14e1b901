//! The two generating endpoints.

use super::received::{Head, Received, receive};
use super::{HttpState, error, headers, sse, whole};
use crate::auth::Caller;
use crate::config::READING_COSTS;
use crate::flow::{Generation, Prepared};
use crate::openai::{
    AnswerHead, AnswerOptions, Common, Endpoint, Parts, chat as chat_request, completions as completions_request,
};
use crate::output::{Opening, cache_hit_percent};
use crate::request::{Prompt, Request, Tools};
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_node::intake::Hold;
use baton_text::answer::{AnswerFormat, AnswerParser};
use baton_types::{ErrorKind, Grammar, RequestError};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
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

async fn answer(state: HttpState, caller: Caller, call: Call, endpoint: Endpoint) -> Response {
    match receive(&state, caller, call).await {
        Ok(received) => {
            let id = received.head.id.clone();
            headers::add_id(generate(&state, received, endpoint).await, &id)
        }
        Err(refused) => refused,
    }
}

/// Parses a body as a request; a long one off the threads that serve connections. The hold then counts the parsed
/// request instead of the body.
pub(super) async fn parse(
    body: Vec<u8>,
    endpoint: Endpoint,
    mut hold: Hold,
) -> Result<((Prompt, Common), Hold), RequestError> {
    hold.set(body.len() as u64 * READING_COSTS)?;
    let long = body.len() > LONG_BODY_BYTES;
    let parse = move || {
        let parsed = match endpoint {
            Endpoint::Chat => chat_request::parse(&body),
            Endpoint::Completions => completions_request::parse(&body),
        }?;
        drop(body);
        // Its text needs no more memory than parsing it; the values of tools and calls do.
        let (held, values) = (hold.bytes(), parsed.0.value_bytes());
        let text = parsed.0.bytes() - values + parsed.1.parameters.model.len() as u64;
        hold.set(text.min(held) + values)?;
        Ok((parsed, hold))
    };
    if !long {
        return parse();
    }
    let failed = |_| RequestError::new(ErrorKind::Internal, "the router failed to read the body; send it again");
    tokio::task::spawn_blocking(parse).await.map_err(failed)?
}

async fn generate(state: &HttpState, received: Received, endpoint: Endpoint) -> Response {
    let Received { head, body, hold } = received;
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
        // A form begins with the first token, without reasoning. One that is not calls has none.
        let (format, tools) = match request.sampling.grammar.as_deref() {
            None => (format, tools),
            Some(Grammar::Calls(_)) => (AnswerFormat { reasons: false, ..format }, tools),
            Some(_) => return None,
        };
        let parser = AnswerParser::new(format, tools, &text.tail(&request.tokens));
        (!parser.is_plain()).then_some(Parts { parser, format: format.calls })
    });
    AnswerHead {
        endpoint,
        id: format!("{prefix}-{}", request.id),
        model: request.served_name().to_owned(),
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
