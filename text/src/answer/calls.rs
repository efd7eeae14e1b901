//! Notations of calls.

use super::Call;
use serde::Deserialize;
use serde_json::value::RawValue;

/// How a family of models writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>\n{"name": …, "arguments": …}\n</tool_call>`, each call by itself: Hermes, Qwen and many that follow them.
    Hermes,
    /// The whole answer is `{"name": …, "parameters": …}`, or several of them with `; ` between: Llama 3.
    Llama,
    /// `[TOOL_CALLS] [{"name": …, "arguments": …}, …]` at the end of the answer: Mistral.
    Mistral,
}

/// What a model writes of one call.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: &'a RawValue,
}

impl CallFormat {
    /// The notation that a template shows the model, if it shows it one that is known.
    pub(super) fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        // Notations with these are others, though they share a mark.
        let is_other = ["<function=", "<arg_key>", "[ARGS]"].iter().any(|mark| has(mark));
        if !has("tools") || is_other {
            return None;
        }
        if has("<tool_call>") {
            Some(Self::Hermes)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("ipython") && has("parameters") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// What begins a call within an answer; `None` if the answer begins with a call, by a brace.
    pub(super) fn opens(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Llama => None,
        }
    }

    /// What ends a call; `None`: the end of the answer.
    pub(super) fn closes(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("</tool_call>"),
            Self::Llama | Self::Mistral => None,
        }
    }

    /// The spelling of the control token that opens calls, where there is one: it is shown in text that is parsed.
    pub fn opening_token(self) -> Option<&'static str> {
        match self {
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Hermes | Self::Llama => None,
        }
    }

    /// What stands before and after the arguments of a call.
    pub fn around_arguments(self, name: &str) -> (String, String) {
        match self {
            Self::Hermes => (format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": "), "}\n</tool_call>".into()),
            Self::Llama => (format!("{{\"name\": \"{name}\", \"parameters\": "), "}".into()),
            Self::Mistral => (format!("{{\"name\": \"{name}\", \"arguments\": "), "}".into()),
        }
    }

    /// What stands before all calls (behind the control token that opens them), between two, and behind all.
    pub fn around_calls(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Hermes => ("", "\n", ""),
            Self::Llama => ("", "; ", ""),
            Self::Mistral => (" [", ", ", "]"),
        }
    }

    /// Whether a text before [`CallFormat::closes`] is the beginning of a call, which goes on: the mark stands in a text of its arguments.
    pub(super) fn goes_on(self, text: &str) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(text.trim_start()).is_err_and(|error| error.is_eof())
    }

    /// The calls in the text between [`CallFormat::opens`] and [`CallFormat::closes`]; `None` if it is none, or calls no known tool.
    pub(super) fn read(self, text: &str, is_tool: impl Fn(&str) -> bool) -> Option<Vec<Call>> {
        let text = text.trim();
        let written: Vec<Written> = match self {
            Self::Hermes => vec![serde_json::from_str(text).ok()?],
            Self::Mistral => serde_json::from_str(text).ok()?,
            Self::Llama => {
                // Objects with `;` between them, which strings may contain as well.
                let (mut all, mut rest) = (Vec::new(), text);
                loop {
                    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Written>();
                    all.push(values.next()?.ok()?);
                    rest = rest[values.byte_offset()..].trim_start();
                    match rest.strip_prefix(';') {
                        Some(more) => rest = more.trim_start(),
                        None if rest.is_empty() => break all,
                        None => return None,
                    }
                }
            }
        };
        let call = |Written { name, arguments }: Written| {
            let text = arguments.get();
            // Some write the object as a text.
            let arguments = if text.starts_with('"') { serde_json::from_str(text).ok()? } else { text.to_owned() };
            let is_object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&arguments).is_ok();
            (is_object && is_tool(&name)).then_some(Call { name, arguments })
        };
        let calls: Vec<Call> = written.into_iter().map(call).collect::<Option<_>>()?;
        (!calls.is_empty()).then_some(calls)
    }
}
