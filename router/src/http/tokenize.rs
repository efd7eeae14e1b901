//! `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: tokens of a prompt as requests have them, and the text
//! of tokens.

use super::generate::parse;
use super::received::{Head, Received, receive};
use super::{HttpState, headers};
use crate::anthropic;
use crate::auth::Caller;
use crate::openai::tokenize::{self as request, Detokenize};
use crate::openai::{Common, chat, completions};
use crate::output::no_room;
use crate::request::check_vocab;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
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
        let (tokens, _) = state.core.tokens_of(&parameters, prompt, head.deadline).await?;
        Ok(json!({"input_tokens": tokens.len()}))
    })
    .await
}

async fn answer(
    state: HttpState,
    caller: Caller,
    call: Call,
    make: impl AsyncFnOnce(&HttpState, Received) -> Result<Value, RequestError>,
) -> Response {
    let received = match receive(&state, caller, call).await {
        Ok(received) => received,
        Err(refused) => return refused,
    };
    let (id, shape) = (received.head.id.clone(), received.head.shape);
    let response = match make(&state, received).await {
        Ok(answer) => Json(answer).into_response(),
        Err(refused) => shape.response(&refused),
    };
    headers::add_id(response, &id)
}

/// Count, ids and, if asked for, texts of the tokens of a prompt or of messages.
async fn tokens(state: &HttpState, received: Received) -> Result<Value, RequestError> {
    let Received { head: Head { client, deadline, .. }, body, hold } = received;
    let asked = request::kind(&body)?;
    let read = if asked.is_chat { chat::parse } else { completions::parse };
    let ((prompt, Common { parameters, .. }), hold) = parse(body, read, hold).await?;
    let (tokens, model) = state.core.tokens_of(&parameters, prompt, deadline).await?;
    drop(hold);
    let mut room = state.core.answers.hold(client);
    room.grow(tokens.len() as u64 * TOKEN_COSTS).map_err(no_room)?;
    let mut answer = json!({"count": tokens.len(), "max_model_len": model.tokens_max, "tokens": tokens});
    if let (true, Some(text)) = (asked.texts, &model.text) {
        answer["token_strs"] = tokens.iter().map(|token| Value::from(text.token_text(*token))).collect();
    }
    Ok(answer)
}

/// The text of tokens, control tokens included.
async fn text(state: &HttpState, received: Received) -> Result<Value, RequestError> {
    let Received { head: Head { client, deadline, .. }, body, hold: _hold } = received;
    let Detokenize { model, tokens } = request::detokenize(&body)?;
    let model = state.core.served_model(&model, deadline).await?;
    check_vocab("tokens", &tokens, &model.card)?;
    let none = || RequestError::invalid("model", "this model has no tokenizer");
    let text = model.text.as_ref().ok_or_else(none)?;
    let mut room = state.core.answers.hold(client);
    room.grow(tokens.len() as u64 * TOKEN_COSTS).map_err(no_room)?;
    Ok(json!({"prompt": text.decode(&tokens)}))
}
