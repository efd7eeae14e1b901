//! The text side of one model: prompts to token ids, token ids to text.

use crate::request::Segment;
use baton_text::{ChatRequest, ChatTemplate, Detokenizer, Message, Specials, TextBundle, TextError, Tokenizer};
use baton_types::{RequestError, TokenId};
use serde_json::{Map, Value};
use std::time::SystemTime;

/// A loaded bundle.
#[derive(Debug)]
pub(crate) struct ModelText {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// Loads a bundle; takes long for large vocabularies.
    pub(crate) fn load(bundle: &TextBundle) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_bundle(bundle)?;
        let template = match ChatTemplate::from_bundle(bundle, &tokenizer) {
            Ok(template) => Some(template),
            Err(TextError::NoChatTemplate) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { tokenizer, template })
    }

    /// Tokens of a chat, laid out by the model's template.
    pub(crate) fn encode_chat(
        &self,
        messages: &[Message],
        arguments: &Map<String, Value>,
    ) -> Result<Vec<TokenId>, RequestError> {
        let template = self.template.as_ref().ok_or(TextError::NoChatTemplate)?;
        let now = SystemTime::now();
        let chat = ChatRequest { messages, tools: None, add_generation_prompt: true, arguments, now };
        Ok(self.tokenizer.encode_prompt(&template.render(&chat)?)?)
    }

    /// Tokens of a plain prompt; one that starts with text gets the model's begin token.
    pub(crate) fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<TokenId>, RequestError> {
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

    /// Decodes one answer.
    pub(crate) fn detokenizer(&self) -> Detokenizer {
        self.tokenizer.detokenizer(true)
    }

    /// Bytes of one token.
    pub(crate) fn token_bytes(&self, token: TokenId) -> Option<Vec<u8>> {
        self.tokenizer.token_bytes(token).map(<[u8]>::to_vec)
    }
}
