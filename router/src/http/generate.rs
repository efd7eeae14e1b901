//! The generating endpoints.

use super::parse::{Parser, parse};
use super::received::{Head, Received, receive};
use super::{HttpState, headers, sse, whole};
use crate::anthropic::{self, MessageForm};
use crate::auth::Caller;
use crate::flow::{Generation, Prepared};
use crate::openai::logprobs::TextOfToken;
use crate::openai::responses::{self, ResponseForm};
use crate::openai::{
    AnswerHead, AnswerOptions, Common, Endpoint, PromptShown, chat as chat_request, completions as completions_request,
};
use crate::output::{Opening, cache_hit_percent};
use crate::request::{Request, ToolChoice, Tools};
use crate::wire::{Form, Parts};
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_node::intake::Client;
use baton_text::answer::{AnswerFormat, AnswerParser};
use baton_types::{Grammar, RequestError};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::time::timeout;

type Call = axum::extract::Request;

pub(super) async fn chat(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, Api::OpenAi(Endpoint::Chat)).await
}

pub(super) async fn completions(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, Api::OpenAi(Endpoint::Completions)).await
}

pub(super) async fn messages(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, Api::Messages).await
}

pub(super) async fn responses(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, Api::Responses).await
}

/// Whose requests and answers.
#[derive(Clone, Copy)]
enum Api {
    OpenAi(Endpoint),
    Responses,
    Messages,
}

impl Api {
    fn parser(self) -> Parser {
        match self {
            Self::OpenAi(Endpoint::Chat) => chat_request::parse,
            Self::OpenAi(Endpoint::Completions) => completions_request::parse,
            Self::Responses => responses::parse,
            Self::Messages => anthropic::parse,
        }
    }
}

async fn answer(state: HttpState, caller: Caller, call: Call, api: Api) -> Response {
    match receive(&state, caller, call).await {
        Ok(received) => {
            let id = received.head.id.clone();
            headers::add_id(generate(&state, received, api).await, &id)
        }
        Err(refused) => refused,
    }
}

async fn generate(state: &HttpState, received: Received, api: Api) -> Response {
    let Received { head, body, hold } = received;
    let shape = head.shape;
    let ((prompt, mut common), hold) = match parse(body, api.parser(), hold).await {
        Ok(parsed) => parsed,
        Err(e) => return shape.response(&e),
    };
    if common.has_effort
        // A model that is not served is told where the request begins.
        && let Ok(model) = state.core.served_model(&common.parameters.model, head.deadline).await
        && !model.text.as_ref().is_some_and(|text| text.template_names(chat_request::EFFORT))
    {
        common.unknown.tell(chat_request::EFFORT);
    }
    if state.strict_fields
        && let Err(e) = common.unknown.check_none()
    {
        return shape.response(&e);
    }
    let Common { parameters, options, unknown, .. } = common;
    let unknown = unknown.into_names();
    state.core.metrics.ignored_fields(unknown.len());
    let Head { id, caller, client, headers, received, deadline, .. } = head;
    let Caller { tenant, weight, key, .. } = caller;
    let request = Request { id, tenant, weight, key, received, deadline, parameters };
    let generation = state.core.generate(request, prompt, &headers).await;
    drop(hold);
    let (response, trace_id) = match generation {
        Err(refused) => (Err(refused.error), refused.trace_id),
        Ok(mut generation) => {
            let trace_id = std::mem::take(&mut generation.trace_id);
            let response = match api {
                Api::OpenAi(endpoint) => {
                    let form = openai_form(endpoint, options, &generation.request);
                    respond(state, form, generation, client).await
                }
                Api::Responses => {
                    let form = response_form(options.stream, &generation.request);
                    respond(state, form, generation, client).await
                }
                Api::Messages => {
                    let form = message_form(options.stream, &generation.request);
                    respond(state, form, generation, client).await
                }
            };
            (response, trace_id)
        }
    };
    let response = headers::add_ignored(response.unwrap_or_else(|e| shape.response(&e)), &unknown);
    headers::add_trace(response, &trace_id)
}

async fn respond(
    state: &HttpState,
    form: impl Form,
    mut generation: Generation,
    client: Client,
) -> Result<Response, RequestError> {
    let room = state.core.answers.hold(client.clone());
    if !form.is_stream() {
        return whole::response(form, generation, room).await;
    }
    let prompt_tokens = form.prompt_tokens();
    // An error before the first token still gets its status code. After a long queue the client gets an open stream
    // with keepalives instead.
    let head = form.opening_bytes() + generation.request.prompt_parts_bytes(generation.events.max());
    let mut opening = Opening::new(form.choices(), &generation.events, head, room)?;
    if let Ok(read) = timeout(state.sse_keepalive, opening.read(&mut generation.events)).await {
        read?;
    }
    let (first, cached_tokens) = opening.done();
    let form = form.stream(cached_tokens, state.core.answers.hold(client));
    let response = sse::response(form, first, generation.events, state.sse_keepalive);
    // A stream that opens before the cached share is known does not report it.
    Ok(match cached_tokens {
        Some(cached) => headers::add_cache_hit(response, cache_hit_percent(cached, prompt_tokens)),
        None => response,
    })
}

/// How the parts of a chat's answer are told apart; `None`: all of it is content.
fn parts(request: &Prepared) -> Option<Parts> {
    let text = request.model.text.as_ref()?;
    let format = text.answer_format()?;
    let tools = request.tools.as_ref().map_or_else(Arc::default, Tools::names);
    // A grammar leaves no room for reasoning, and only one of calls has parts.
    let (format, tools) = match request.sampling.grammar.as_deref() {
        None => (format, tools),
        Some(Grammar::Calls(_)) => (AnswerFormat { reasons: false, ..format }, tools),
        Some(_) => return None,
    };
    let parser = AnswerParser::new(format, tools, &text.tail(&request.prompt().tokens));
    (!parser.is_plain()).then_some(Parts { parser, format: format.calls })
}

/// Unix time, in seconds.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn openai_form(endpoint: Endpoint, options: AnswerOptions, request: &Prepared) -> AnswerHead {
    let prefix = match endpoint {
        Endpoint::Chat => "chatcmpl",
        Endpoint::Completions => "cmpl",
    };
    AnswerHead {
        endpoint,
        id: format!("{prefix}-{}", request.id),
        model: request.served_name().to_owned(),
        created: now(),
        prompts: request
            .prompts
            .iter()
            .map(|prompt| PromptShown {
                tokens: prompt.tokens.len(),
                ids: if options.return_token_ids { prompt.tokens.clone() } else { Arc::default() },
                first: prompt.tokens.first().copied(),
                text: prompt.text.clone(),
            })
            .collect(),
        options,
        samples: request.samples,
        seed: request.sampling.seed,
        parts: (endpoint == Endpoint::Chat).then(|| parts(request)).flatten(),
        token_text: token_text(request),
    }
}

fn token_text(request: &Prepared) -> TextOfToken {
    let text = request.model.text.clone();
    Arc::new(move |token| text.as_ref()?.token_bytes(token))
}

fn response_form(is_stream: bool, request: &Prepared) -> ResponseForm {
    let tools = request.tools.as_ref();
    ResponseForm {
        id: format!("resp_{}", request.id),
        model: request.served_name().to_owned(),
        created: now(),
        is_stream,
        prompt_tokens: request.prompt_tokens(),
        max_tokens: request.parameters.sampling.max_tokens,
        temperature: request.sampling.temperature,
        top_p: request.sampling.top_p,
        tool_choice: tools.map_or(ToolChoice::Auto, |tools| tools.choice.clone()),
        is_parallel: tools.is_none_or(|tools| tools.is_parallel),
        seed: request.sampling.seed,
        parts: parts(request),
        token_text: token_text(request),
    }
}

fn message_form(is_stream: bool, request: &Prepared) -> MessageForm {
    MessageForm {
        id: format!("msg_{}", request.id),
        model: request.served_name().to_owned(),
        is_stream,
        prompt_tokens: request.prompt_tokens() as u32,
        seed: request.sampling.seed,
        parts: parts(request),
    }
}
