//! `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: tokens of a prompt as requests have them, and the text
//! of tokens.

use super::parse::{Parser, parse, parse_within, read};
use super::received::{Head, Received, receive};
use super::{HttpState, headers, whole};
use crate::anthropic;
use crate::auth::Caller;
use crate::openai::tokenize::{self as request, Detokenize};
use crate::openai::{Common, chat, completions};
use crate::output::no_room;
use crate::request::check_vocab;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_node::intake::Hold;
use baton_types::RequestError;
use serde_json::{Value, json};

type Call = axum::extract::Request;

/// Memory of a token in an answer: its id and its text, as JSON values and written.
const TOKEN_COSTS: u64 = 200;

pub(super) async fn tokenize(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, async |state, received| tokens(state, received).await).await
}

pub(super) async fn detokenize(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, async |state, received| text(state, received).await).await
}

/// Tokens of what would be a request of `/v1/messages`.
pub(super) async fn count(state: State<HttpState>, caller: Extension<Caller>, call: Call) -> Response {
    answer(state.0, caller.0, call, async |state, received| {
        let Received { head, body, hold } = received;
        let ((prompt, Common { parameters, .. }), _hold) = parse(body, anthropic::parse_counted, hold).await?;
        let (tokens, _) = state.core.tokens_of(&head.caller.tenant, &parameters, prompt, head.deadline).await?;
        whole::value(state.core.answers.hold(head.client), move || json!({"input_tokens": tokens.len()})).await
    })
    .await
}

async fn answer(
    state: HttpState,
    caller: Caller,
    call: Call,
    make: impl AsyncFnOnce(&HttpState, Received) -> Result<Response, RequestError>,
) -> Response {
    let received = match receive(&state, caller, call).await {
        Ok(received) => received,
        Err(refused) => return refused,
    };
    let (id, shape) = (received.head.id.clone(), received.head.shape);
    let response = match make(&state, received).await {
        Ok(answer) => answer,
        Err(refused) => shape.response(&refused),
    };
    headers::add_id(response, &id)
}

/// Count, ids and, if asked for, texts of the tokens of a prompt or of messages.
async fn tokens(state: &HttpState, received: Received) -> Result<Response, RequestError> {
    let Received { head: Head { caller, client, deadline, .. }, body, hold } = received;
    let parse = |body: Vec<u8>, hold: &mut Hold| {
        let asked = request::kind(&body)?;
        let parser: Parser = if asked.is_chat { chat::parse } else { completions::parse };
        Ok((asked, parse_within(body, parser, hold)?))
    };
    let ((asked, (prompt, Common { parameters, .. })), hold) = read(body, parse, hold).await?;
    let (tokens, model) = state.core.tokens_of(&caller.tenant, &parameters, prompt, deadline).await?;
    drop(hold);
    let mut room = state.core.answers.hold(client);
    room.grow(tokens.len() as u64 * TOKEN_COSTS).map_err(no_room)?;
    let answer = move || {
        let mut answer = json!({"count": tokens.len(), "max_model_len": model.tokens_max, "tokens": tokens});
        if let (true, Some(text)) = (asked.texts, &model.text) {
            answer["token_strs"] = tokens.iter().map(|token| Value::from(text.token_text(*token))).collect();
        }
        answer
    };
    whole::value(room, answer).await
}

/// The text of tokens, control tokens included.
async fn text(state: &HttpState, received: Received) -> Result<Response, RequestError> {
    let Received { head: Head { client, deadline, .. }, body, hold } = received;
    let (Detokenize { model, tokens }, _hold) = read(body, |body, _| request::detokenize(&body), hold).await?;
    let model = state.core.served_model(&model, deadline).await?;
    check_vocab("tokens", &tokens, &model.card)?;
    let none = || RequestError::invalid("model", "this model has no tokenizer");
    let text = model.text.clone().ok_or_else(none)?;
    let mut room = state.core.answers.hold(client);
    room.grow(tokens.len() as u64 * TOKEN_COSTS).map_err(no_room)?;
    whole::value(room, move || json!({"prompt": text.decode(&tokens)})).await
}
