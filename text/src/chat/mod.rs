//! Chat messages to a prompt, through the model's own Jinja template.
//!
//! The template decides the text; this module decides which control tokens are the template's own. Control tokens in
//! the template's source, and its begin and end tokens, are replaced by sentinels during the rendering: private-use
//! characters that occur nowhere in the messages. The content itself is passed unchanged, so templates may trim, cut,
//! compare and search it as usual. After rendering, each sentinel becomes its control token. A control token spelled
//! out in letters is text, unless the template composed it from pieces (`'<|' + role + '|>'`); the file `marks.rs`
//! describes how the two are distinguished.

mod continued;
mod environment;
mod json;
mod marks;
mod message;
mod source;
mod tools;

use aho_corasick::AhoCorasick;
use baton_types::TextBundle;
use minijinja::Value;
use serde_json::Map;
use std::time::SystemTime;

use crate::answer::AnswerFormat;
use crate::{Prompt, TextError, Tokenizer};
use environment::Compiled;
use marks::Marks;
pub use message::{Content, Message, Role};
use source::Source;
use tools::{Place, as_text, describe_tools};

/// Arguments that the server sets.
const RESERVED: [&str; 9] = [
    "raise_exception",
    "strftime_now",
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "chat_template",
];

/// One conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatRequest<'a> {
    /// The messages, oldest first.
    pub messages: &'a [Message],
    /// Tools in OpenAI's form, if there are any.
    pub tools: Option<&'a serde_json::Value>,
    /// What comes after the messages.
    pub ending: Ending,
    /// Further template arguments (`chat_template_kwargs`).
    pub arguments: &'a Map<String, serde_json::Value>,
    /// The current time for the template, in UTC.
    pub now: SystemTime,
}

/// How the prompt of a chat ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// With the beginning of the assistant's answer (`add_generation_prompt`).
    #[default]
    Answer,
    /// With the last message.
    Messages,
    /// Within the last message, after its text, which the answer continues.
    Continued,
}

/// A model's chat template, ready to render.
pub struct ChatTemplate {
    source: Source,
    tokenizer: Tokenizer,
    bos_token: String,
    eos_token: String,
    compiled: Compiled,
    marks: Marks,
    forms: message::Forms,
    format: AnswerFormat,
    /// Whether it shows the calls of earlier messages.
    shows_calls: bool,
    /// What [`Source::comparable`] returned for the template.
    comparable: AhoCorasick,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl ChatTemplate {
    /// Compiles the bundle's template; [`TextError::NoChatTemplate`] if it has none.
    pub fn from_bundle(bundle: &TextBundle, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let source = Source::new(bundle.chat_template.as_deref().ok_or(TextError::NoChatTemplate)?)?;
        let marks = Marks::avoiding(tokenizer.controls(), source.text())?;
        let compiled = Compiled::new(&source, tokenizer.controls(), &marks)?;
        let mut template = Self {
            forms: message::Forms {
                developer: source.quotes("developer"),
                thinking: source.text().contains(".thinking"),
                ..Default::default()
            },
            format: AnswerFormat::of_template(source.text()),
            shows_calls: source.text().contains("tool_calls"),
            comparable: source.comparable(tokenizer.controls())?,
            source,
            tokenizer: tokenizer.clone(),
            bos_token: bundle.bos_token.clone().unwrap_or_default(),
            eos_token: bundle.eos_token.clone().unwrap_or_default(),
            compiled,
            marks,
        };
        template.forms.content = message::ContentForm::probe(|message| template.probe(vec![message]));
        template.forms.argument_texts = message::takes_argument_texts(|messages| template.probe(messages));
        Ok(template)
    }

    /// How the model writes what is no plain text, as the template shows it.
    pub fn answer_format(&self) -> AnswerFormat {
        self.format
    }

    /// Whether the template's text has this name of an argument.
    pub fn names(&self, argument: &str) -> bool {
        self.source.text().contains(argument)
    }

    /// As [`Self::render`], of messages that are adapted to the template where it does not take them as they are. One that shows no tools
    /// gets a message that describes them: one of the system, or where it accepts none, the first one of the user.
    pub fn render_adapted(&self, request: &ChatRequest<'_>) -> Result<Prompt, TextError> {
        let Some(tools) = request.tools.filter(|_| !self.format.shows_tools) else {
            return self.render_with_content(request);
        };
        let in_place = |place| {
            let calls = self.format.calls;
            let texts = if self.shows_calls { request.messages.to_vec() } else { as_text(request.messages, calls) };
            let described = describe_tools(texts, tools, calls, place);
            self.render_with_content(&ChatRequest { messages: &described, tools: None, ..*request })
        };
        in_place(Place::System).or_else(|error| in_place(Place::User).map_err(|_| error))
    }

    /// Messages that call tools may have no content, which some templates do not accept: then it is the calls, or the empty text where the
    /// template shows calls.
    fn render_with_content(&self, request: &ChatRequest<'_>) -> Result<Prompt, TextError> {
        let is_bare = |message: &Message| message.content.is_none() && message.extra.contains_key("tool_calls");
        let rendered = self.render(request);
        if rendered.is_ok() || !request.messages.iter().any(is_bare) {
            return rendered;
        }
        let fill = |message: &Message| {
            let empty = || Some(Content::Text(String::new()));
            Message { content: if is_bare(message) { empty() } else { message.content.clone() }, ..message.clone() }
        };
        let messages: Vec<Message> = match self.shows_calls {
            true => request.messages.iter().map(fill).collect(),
            false => as_text(request.messages, self.format.calls),
        };
        self.render(&ChatRequest { messages: &messages, ..*request }).or(rendered)
    }

    /// The prompt, as Hugging Face's `apply_chat_template` makes it.
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<Prompt, TextError> {
        if request.ending != Ending::Continued {
            return self.render_any(request);
        }
        let last =
            request.messages.last().and_then(continued::text).ok_or(TextError::NotContinued("it has no text"))?;
        let prompt = self.render_any(request)?;
        let is_whole = prompt.text().contains(last.trim());
        let part = TextError::NotContinued("the model's chat template leaves out a part of it");
        if is_whole { Ok(prompt) } else { Err(part) }
    }

    fn render_any(&self, request: &ChatRequest<'_>) -> Result<Prompt, TextError> {
        if let Some(name) = request.arguments.keys().find(|name| RESERVED.contains(&name.as_str())) {
            return Err(TextError::ReservedArgument(name.clone()));
        }
        if self.marks.occur_in(request) {
            // The request contains our private-use characters: other ones are used for it.
            let marks = Marks::avoiding(self.tokenizer.controls(), &marks::foreign(request, self.source.text()))?;
            let compiled = Compiled::new(&self.source, self.tokenizer.controls(), &marks)?;
            return self.render_with(&compiled, &marks, request);
        }
        self.render_with(&self.compiled, &self.marks, request)
    }

    fn render_with(&self, compiled: &Compiled, marks: &Marks, request: &ChatRequest<'_>) -> Result<Prompt, TextError> {
        let controls = self.tokenizer.controls();
        let render = |text: &dyn Fn(&str) -> String| {
            let output = compiled.render(self.arguments(marks, request, text), request.now)?;
            if request.ending == Ending::Continued { continued::cut(output, marks) } else { Ok(output) }
        };
        let output = render(&str::to_owned)?;
        let prompt = marks.resolve(&output, controls, false);
        if !marks.spells_controls(&output, controls) {
            return Ok(prompt);
        }
        // A control token is spelled out: by a message, or by the template from pieces. Render again with messages that
        // cannot spell any, and check which remain.
        let shadowed = |text: &str| marks.shadow(text, &self.comparable);
        let Ok(shadow) = render(&shadowed) else {
            return Err(TextError::Ambiguous);
        };
        if !marks.spells_controls(&shadow, controls) {
            return Ok(prompt);
        }
        let composed = marks.resolve(&shadow, controls, true);
        if composed.text() == prompt.text() { Ok(composed) } else { Err(TextError::Ambiguous) }
    }

    /// The template's arguments. `text` is applied to every string that a client wrote.
    fn arguments(
        &self,
        marks: &Marks,
        request: &ChatRequest<'_>,
        text: &dyn Fn(&str) -> String,
    ) -> Vec<(Value, Value)> {
        let controls = self.tokenizer.controls();
        let mut messages: Vec<Value> = request.messages.iter().map(|m| m.to_template(self.forms, text)).collect();
        if request.ending == Ending::Continued
            && let (Some(value), Some(last)) = (messages.last_mut(), request.messages.last())
        {
            *value = continued::marked(last, marks).to_template(self.forms, text);
        }
        let set = [
            ("messages", Value::from(messages)),
            ("tools", request.tools.map_or(Value::from(()), |tools| json::to_template(tools, text))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(request.ending == Ending::Answer)),
            ("bos_token", Value::from(marks.mark(&self.bos_token, controls))),
            ("eos_token", Value::from(marks.mark(&self.eos_token, controls))),
        ];
        // An argument that is a word of the template (`'high'`) is an option, not text.
        let word = |value: &str| value.chars().all(|c| c.is_alphanumeric() || "-_".contains(c));
        let choice =
            |value: &str| if word(value) && self.source.quotes(value) { value.to_owned() } else { text(value) };
        let further = request.arguments.iter().map(|(name, value)| (name.as_str(), json::to_template(value, &choice)));
        set.into_iter().chain(further).map(|(name, value)| (Value::from(name), value)).collect()
    }

    /// The rendering of these messages; none if it fails.
    fn probe(&self, messages: Vec<Value>) -> Option<String> {
        let (now, nothing) = (SystemTime::UNIX_EPOCH, Map::new());
        let empty = ChatRequest { messages: &[], tools: None, ending: Ending::Answer, arguments: &nothing, now };
        let mut arguments = self.arguments(&self.marks, &empty, &str::to_owned);
        arguments[0].1 = Value::from(messages);
        self.compiled.render(arguments, now).ok()
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("forms", &self.forms).finish_non_exhaustive()
    }
}
