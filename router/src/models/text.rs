//! The text side of one model: prompts to token ids, token ids to text.

use crate::request::Segment;
use baton_text::{ChatRequest, ChatTemplate, Detokenizer, Message, Specials, TextBundle, TextError, Tokenizer};
use baton_types::{ErrorKind, RequestError, TokenId};
use serde_json::{Map, Value};
use std::time::SystemTime;

#[derive(Debug)]
pub(crate) struct ModelText {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// Loads a bundle; takes long for large vocabularies.
    pub(crate) fn load(bundle: &TextBundle) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_bundle(bundle)?;
        if let Some(reason) = tokenizer.slow_because() {
            tracing::info!(reason, "tokenizes a model's text by the slower library");
        }
        let template = match ChatTemplate::from_bundle(bundle, &tokenizer) {
            Ok(template) => Some(template),
            Err(TextError::NoChatTemplate) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { tokenizer, template })
    }

    /// Tokens of a chat, rendered with the model's template. A chat that cannot fit in `tokens_max` is refused before
    /// it is tokenized.
    pub(crate) fn encode_chat(
        &self,
        messages: &[Message],
        arguments: &Map<String, Value>,
        tokens_max: u64,
    ) -> Result<Vec<TokenId>, RequestError> {
        let template = self.template.as_ref().ok_or(TextError::NoChatTemplate)?;
        let now = SystemTime::now();
        let chat = ChatRequest { messages, tools: None, add_generation_prompt: true, arguments, now };
        let prompt = template.render(&chat)?;
        self.check_bytes(prompt.text().len(), tokens_max, "messages")?;
        Ok(self.tokenizer.encode_prompt(&prompt)?)
    }

    /// Tokens of a plain prompt; a prompt that starts with text gets the model's begin token. Refuses as
    /// [`Self::encode_chat`] does.
    pub(crate) fn encode_segments(&self, segments: &[Segment], tokens_max: u64) -> Result<Vec<TokenId>, RequestError> {
        let text = |s: &Segment| if let Segment::Text(text) = s { text.len() } else { 0 };
        self.check_bytes(segments.iter().map(text).sum(), tokens_max, "prompt")?;
        let mut tokens = Vec::new();
        if matches!(segments.first(), Some(Segment::Text(_))) {
            tokens.extend(self.tokenizer.bos());
        }
        for segment in segments {
            match segment {
                Segment::Text(text) => tokens.extend(self.tokenizer.encode(text, Specials::AsText)?),
                Segment::Tokens(ids) => tokens.extend_from_slice(ids),
            }
        }
        Ok(tokens)
    }

    fn check_bytes(&self, bytes: usize, tokens_max: u64, param: &str) -> Result<(), RequestError> {
        let Some(longest) = self.tokenizer.token_bytes_max() else { return Ok(()) };
        let tokens = (bytes / longest.max(1)) as u64;
        if tokens < tokens_max {
            return Ok(());
        }
        let message = format!(
            "the prompt's {bytes} bytes are at least {tokens} tokens; the limit of this model here is {tokens_max} tokens. Shorten it"
        );
        Err(RequestError::new(ErrorKind::ContextLengthExceeded, message).param(param))
    }

    /// A detokenizer for one answer.
    pub(crate) fn detokenizer(&self) -> Detokenizer {
        self.tokenizer.detokenizer(true)
    }

    /// Bytes of one token.
    pub(crate) fn token_bytes(&self, token: TokenId) -> Option<Vec<u8>> {
        self.tokenizer.token_bytes(token).map(<[u8]>::to_vec)
    }
}
