//! `POST /tokenize` and `POST /detokenize`, as in vLLM: the requests.

use crate::wire::fields::{Fields, Policy, Row};
use baton_types::{RequestError, TokenId};

/// What a request to tokenize is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokenize {
    /// Messages, not a plain prompt.
    pub(crate) is_chat: bool,
    /// Whether the text of each token is wanted, too.
    pub(crate) texts: bool,
}

pub(crate) const TOKENIZE: &[Row] = &[("messages", Policy::Supported), ("return_token_strs", Policy::Supported)];

/// What kind of prompt a request has. The rest of it is read as a request of that kind.
pub(crate) fn kind(body: &[u8]) -> Result<Tokenize, RequestError> {
    let mut fields = Fields::parse(body, TOKENIZE)?;
    let is_chat = fields.take_raw("messages").is_some();
    Ok(Tokenize { is_chat, texts: fields.take("return_token_strs")?.unwrap_or(false) })
}

/// Tokens whose text is wanted.
#[derive(Debug)]
pub(crate) struct Detokenize {
    /// Empty if the client leaves the choice to the cluster.
    pub(crate) model: String,
    pub(crate) tokens: Vec<TokenId>,
}

pub(crate) const DETOKENIZE: &[Row] = &[("model", Policy::Supported), ("tokens", Policy::Supported)];

pub(crate) fn detokenize(body: &[u8]) -> Result<Detokenize, RequestError> {
    let mut fields = Fields::parse(body, DETOKENIZE)?;
    let shape = || RequestError::invalid("tokens", "tokens is required: a list of token ids");
    let tokens = fields.take_raw("tokens").ok_or_else(shape)?;
    let tokens = serde_json::from_str(tokens.get()).map_err(|_| shape())?;
    Ok(Detokenize { model: fields.take("model")?.unwrap_or_default(), tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_requests() {
        let of = |body: &str| kind(body.as_bytes()).unwrap();
        assert_eq!(of(r#"{"prompt": "x"}"#), Tokenize { is_chat: false, texts: false });
        assert_eq!(of(r#"{"messages": [], "return_token_strs": true}"#), Tokenize { is_chat: true, texts: true });
        assert_eq!(detokenize(br#"{"tokens": [1, 2]}"#).unwrap().tokens, [1, 2]);
        for wrong in ["{}", r#"{"tokens": "1"}"#, r#"{"tokens": [-1]}"#] {
            assert_eq!(detokenize(wrong.as_bytes()).unwrap_err().param.as_deref(), Some("tokens"), "{wrong}");
        }
    }
}
