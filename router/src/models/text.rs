//! The text side of one model: prompts to token ids, token ids to text.

use crate::request::{Segment, chat_text_bytes};
use baton_text::answer::{AnswerFormat, NotationPart};
use baton_text::{
    ChatRequest, ChatTemplate, Detokenizer, Ending, Message, Prompt, Specials, TextBundle, TextError, Tokenizer,
};
use baton_types::{ErrorKind, RequestError, TokenId};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::SystemTime;

/// A template may leave out parts of the messages, such as earlier reasoning: what it renders is assumed to be at least
/// this fraction (one in four) of their text.
const RENDERED_PART: usize = 4;

/// Tokens in which a template may open the reasoning of the answer: `<think>` in pieces, and line breaks.
const TAIL_TOKENS: usize = 8;

/// What a prompt may take, checked before it is tokenized.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromptBounds {
    pub(crate) tokens_max: u64,
    /// Whether a prompt with more tokens is cut, not refused.
    pub(crate) truncates: bool,
    /// Memory for tokenizing one prompt.
    pub(crate) memory_max: u64,
}

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

    /// Memory for tokenizing this many bytes of text, in bytes.
    pub(crate) fn takes(&self, text_bytes: usize) -> u64 {
        (text_bytes as u64).saturating_mul(self.tokenizer.memory_per_byte())
    }

    /// A chat, rendered with the model's template. A chat that cannot fit in `bounds` is refused before it is tokenized,
    /// and one with far too much text before it is rendered.
    pub(crate) fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        arguments: &Map<String, Value>,
        ending: Ending,
        bounds: PromptBounds,
    ) -> Result<Prompt, RequestError> {
        let template = self.template.as_ref().ok_or(TextError::NoChatTemplate)?;
        let text = chat_text_bytes(messages, tools, arguments);
        // A template may copy all of it for each message, as often as it likes, so memory counts for all.
        let takes_too_much = self.takes(text) > bounds.memory_max;
        if takes_too_much || self.check_bytes(text / RENDERED_PART, bounds, "messages").is_err() {
            let message = format!(
                "This model's maximum context length is {} tokens. The messages and their arguments have {text} bytes of text, far more than its prompts can have here. Shorten them",
                bounds.tokens_max
            );
            return Err(RequestError::new(ErrorKind::ContextLengthExceeded, message).param("messages"));
        }
        let now = SystemTime::now();
        let chat = ChatRequest { messages, tools, ending, arguments, now };
        let prompt = template.render_adapted(&chat)?;
        self.check_bytes(prompt.text().len(), bounds, "messages")?;
        Ok(prompt)
    }

    /// Tokens of a rendered chat.
    pub(crate) fn encode(&self, prompt: &Prompt) -> Result<Vec<TokenId>, RequestError> {
        Ok(self.tokenizer.encode_prompt(prompt)?)
    }

    /// Tokens of a plain prompt; a prompt that starts with text gets the model's begin token. Refuses as
    /// [`Self::render`] does.
    pub(crate) fn encode_segments(
        &self,
        segments: &[Segment],
        bounds: PromptBounds,
    ) -> Result<Vec<TokenId>, RequestError> {
        let text = |s: &Segment| if let Segment::Text(text) = s { text.len() } else { 0 };
        self.check_bytes(segments.iter().map(text).sum(), bounds, "prompt")?;
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

    /// Tokens of a short text on its own.
    pub(crate) fn encode_word(&self, word: &str) -> Result<Vec<TokenId>, RequestError> {
        Ok(self.tokenizer.encode(word, Specials::AsText)?)
    }

    fn check_bytes(&self, bytes: usize, bounds: PromptBounds, param: &str) -> Result<(), RequestError> {
        let PromptBounds { tokens_max, truncates, memory_max } = bounds;
        let refuse = |message| Err(RequestError::new(ErrorKind::ContextLengthExceeded, message).param(param));
        let tokens = self.tokenizer.token_bytes_max().map_or(0, |longest| (bytes / longest.max(1)) as u64);
        if tokens >= tokens_max && !truncates {
            return refuse(format!(
                "This model's maximum context length is {tokens_max} tokens. The prompt's {bytes} bytes are at least {tokens} tokens. Shorten it"
            ));
        }
        if self.takes(bytes) > memory_max {
            let most = memory_max / self.tokenizer.memory_per_byte();
            return refuse(format!(
                "the prompt's {bytes} bytes take too much memory to tokenize; at most {most} bytes of text are tokenized for this model, by the router's limits.intake_bytes_max. Shorten it"
            ));
        }
        Ok(())
    }

    /// A detokenizer for one answer. `shown` are control tokens that its text has all the same.
    pub(crate) fn detokenizer(&self, shown: Arc<[TokenId]>) -> Detokenizer {
        self.tokenizer.detokenizer(true).showing(shown)
    }

    /// Whether the chat template reads an argument of this name.
    pub(crate) fn template_names(&self, argument: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.names(argument))
    }

    /// How the model writes calls and reasoning; `None` if it has no chat template.
    pub(crate) fn answer_format(&self) -> Option<AnswerFormat> {
        self.template.as_ref().map(ChatTemplate::answer_format)
    }

    /// Tokens at the end of a chat's prompt whose answer is content alone: where a model's answers are messages, they open one.
    pub(crate) fn opens_content(&self) -> Result<Vec<TokenId>, RequestError> {
        let Some(format) = self.answer_format() else { return Ok(Vec::new()) };
        let mut tokens = Vec::new();
        for part in format.calls.parts(format.opens_content()) {
            match part {
                NotationPart::Text(text) => tokens.extend(self.tokenizer.encode(text, Specials::AsText)?),
                NotationPart::Control(spelling) => tokens.extend(self.tokenizer.token_id(spelling)),
            }
        }
        Ok(tokens)
    }

    /// Id of a token by its spelling.
    pub(crate) fn token_id(&self, token: &str) -> Option<TokenId> {
        self.tokenizer.token_id(token)
    }

    /// The text of the last few tokens.
    pub(crate) fn tail(&self, tokens: &[TokenId]) -> String {
        self.decode(&tokens[tokens.len().saturating_sub(TAIL_TOKENS)..])
    }

    /// The text of tokens, control tokens included.
    pub(crate) fn decode(&self, tokens: &[TokenId]) -> String {
        self.tokenizer.decode(tokens, false)
    }

    /// A token as text to be shown alone.
    pub(crate) fn token_text(&self, token: TokenId) -> String {
        self.tokenizer.token_text(token)
    }

    /// Bytes of one token.
    pub(crate) fn token_bytes(&self, token: TokenId) -> Option<Vec<u8>> {
        self.tokenizer.token_bytes(token).map(<[u8]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::text::{byte_bundle, byte_bundle_of};
    use baton_text::{Role, bundle};

    const ANY: PromptBounds = PromptBounds { tokens_max: u64::MAX, truncates: false, memory_max: u64::MAX };

    /// Every byte is a token of it, except in `<|end|>`, which has 7. `before` comes before its template.
    fn text(normalizer: &str, before: &str) -> ModelText {
        let mut bundle = bundle::decode(&byte_bundle(before)).unwrap();
        let json = bundle.tokenizer_json.replace("\"normalizer\":null", &format!("\"normalizer\":{normalizer}"));
        bundle.tokenizer_json = json;
        ModelText::load(&bundle).unwrap()
    }

    fn encode(text: &ModelText, prompt: &str, bounds: PromptBounds) -> Result<usize, String> {
        match text.encode_segments(&[Segment::Text(prompt.into())], bounds) {
            Ok(tokens) => Ok(tokens.len()),
            Err(error) => {
                assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::ContextLengthExceeded, Some("prompt")));
                Err(error.message)
            }
        }
    }

    #[test]
    fn a_form_opens_a_message_where_answers_are_messages() {
        let opens = |template: &str| {
            let controls = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"];
            let bundle = bundle::decode(&byte_bundle_of(template.to_owned(), &controls)).unwrap();
            ModelText::load(&bundle).unwrap().opens_content().unwrap()
        };
        let harmony = "{{ '<|start|><|channel|><|constrain|><|message|>' }}";
        let expected: Vec<TokenId> = [257].into_iter().chain("final".bytes().map(TokenId::from)).chain([259]).collect();
        assert_eq!(opens(harmony), expected);
        assert!(opens("<|start|>{{ messages[0].content }}").is_empty());
    }

    #[test]
    fn text_that_takes_too_much_memory_is_not_tokenized() {
        let (long, longer) = ("x".repeat(1000), "x".repeat(1001));
        let strip = r#"{"type": "Strip", "strip_left": true, "strip_right": true}"#;
        // By the library, and on the fast path, where more text would fit the context.
        for (normalizer, costs) in
            [(r#"{"type": "NFKC"}"#, 120), (strip, 120), ("null", 40), (r#"{"type": "NFC"}"#, 40)]
        {
            let (text, bounds) = (text(normalizer, ""), PromptBounds { memory_max: costs * 1000, ..ANY });
            assert_eq!((text.takes(1000), encode(&text, &long, bounds)), (bounds.memory_max, Ok(1000)));
            let told = encode(&text, &longer, bounds).unwrap_err();
            assert!(told.contains("at most 1000 bytes") && told.contains("limits.intake_bytes_max"), "{told}");
        }
    }

    #[test]
    fn normalized_text_is_bounded_by_its_tokens() {
        let bounds = PromptBounds { tokens_max: 100, ..ANY };
        let replace = r#"{"type": "Replace", "pattern": {"String": " "}, "content": "_"}"#;
        // A longest token of 7 bytes; of text composed to that, at most four times as much.
        for (normalizer, bytes) in [("null", 700), (replace, 700), (r#"{"type": "NFC"}"#, 2800)] {
            let text = text(normalizer, "");
            assert_eq!(encode(&text, &"x".repeat(bytes - 1), bounds), Ok(bytes - 1), "whoever calls counts them");
            let told = encode(&text, &"x".repeat(bytes), bounds).unwrap_err();
            assert!(
                told.contains(&format!(
                    "context length is 100 tokens. The prompt's {bytes} bytes are at least 100 tokens"
                )),
                "{told}"
            );
        }
    }

    #[test]
    fn text_that_becomes_no_token_does_not_count() {
        let changed = |change: fn(&mut Value)| {
            let mut bundle = bundle::decode(&byte_bundle("")).unwrap();
            let mut json = serde_json::from_str(&bundle.tokenizer_json).unwrap();
            change(&mut json);
            bundle.tokenizer_json = json.to_string();
            ModelText::load(&bundle).unwrap()
        };
        let removes = changed(|json| {
            let split = serde_json::json!({"type": "Split", "pattern": {"Regex": " +"}, "behavior": "Removed", "invert": false});
            json["pre_tokenizer"] =
                serde_json::json!({"type": "Sequence", "pretokenizers": [split, json["pre_tokenizer"]]});
        });
        let lacks = changed(|json| {
            let vocab = json["model"]["vocab"].as_object_mut().unwrap();
            vocab.remove("\u{120}").expect("a token of one space");
        });
        let bounds = PromptBounds { tokens_max: 10, ..ANY };
        for text in [removes, lacks] {
            assert_eq!(encode(&text, &format!("a{}b", " ".repeat(1000)), bounds), Ok(2));
        }
    }

    #[test]
    fn a_chat_with_far_too_much_text_is_not_rendered() {
        let bounds = PromptBounds { tokens_max: 10, ..ANY };
        let chat = |text: &ModelText, first: usize| {
            let messages = [Message::text(Role::User, "x".repeat(first)), Message::text(Role::User, "hi")];
            text.encode(&text.render(&messages, None, &Map::new(), Ending::Answer, bounds)?).map(|tokens| tokens.len())
        };
        let kind = |result: Result<usize, RequestError>| result.map_err(|error| error.kind);
        let refuses = text("null", "{{ raise_exception('rendered') }}");
        let told = chat(&refuses, 10 * 7 * 4).unwrap_err();
        assert_eq!(told.kind, ErrorKind::ContextLengthExceeded);
        assert!(
            told.message
                .contains("context length is 10 tokens. The messages and their arguments have 282 bytes of text"),
            "{}",
            told.message
        );
        assert_eq!(kind(chat(&refuses, 10 * 7 * 2)), Err(ErrorKind::InvalidRequest), "rendered");
        let last = text("null", "{% set messages = messages[-1:] %}");
        assert_eq!(kind(chat(&last, 10 * 7 * 2)), Ok("[user]hi ".len()), "what a template leaves out does not count");
    }

    #[test]
    fn all_that_reaches_the_template_counts_before_it_is_rendered() {
        let refuses = text("null", "{{ raise_exception('rendered') }}");
        let kind = |message: &Message, arguments: &Map<String, Value>, bounds| {
            refuses.render(std::slice::from_ref(message), None, arguments, Ending::Answer, bounds).unwrap_err().kind
        };
        let of = |bytes: usize| [("a".to_owned(), Value::from("x".repeat(bytes)))].into_iter().collect::<Map<_, _>>();
        let (plain, nothing) = (Message::text(Role::User, "hi"), Map::new());
        for (bytes, expected) in [(997, ErrorKind::InvalidRequest), (998, ErrorKind::ContextLengthExceeded)] {
            let named = Message { extra: of(bytes), ..plain.clone() };
            let bounds = PromptBounds { memory_max: 40 * 1000, ..ANY };
            assert_eq!(kind(&named, &nothing, bounds), expected, "{bytes} bytes of a name");
            assert_eq!(kind(&plain, &of(bytes), bounds), expected, "{bytes} bytes of an argument");
        }
    }
}
