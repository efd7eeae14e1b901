//! Notations of calls.

use super::{Call, harmony};
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
    /// `[TOOL_CALLS]name[ARGS]{…}` for each call, at the end of the answer: Mistral Small 3.2 and later.
    MistralArgs,
    /// `<|tool_call|>[{"name": …, "arguments": …}, …]` at the end of the answer: Granite 3.
    Granite,
    /// Calls between control tokens at the end of the answer, each with its name, and its arguments in a block of code: DeepSeek V3, R1.
    DeepSeek,
    /// The same with bare arguments: DeepSeek V3.1 and later.
    DeepSeekBare,
    /// A message for a function: gpt-oss. See `harmony.rs`.
    Harmony,
}

/// A part of a notation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotationPart<'a> {
    /// Text, of any tokens but control tokens.
    Text(&'a str),
    /// The spelling of a control token.
    Control(&'a str),
}

const MISTRAL_CALLS: &str = "[TOOL_CALLS]";
const MISTRAL_ID: &str = "[CALL_ID]";
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
const GRANITE_CALLS: &str = "<|tool_call|>";
const DEEPSEEK_CALLS: &str = "<｜tool▁calls▁begin｜>";
const DEEPSEEK_CALLS_END: &str = "<｜tool▁calls▁end｜>";
const DEEPSEEK_CALL: &str = "<｜tool▁call▁begin｜>";
const DEEPSEEK_CALL_END: &str = "<｜tool▁call▁end｜>";
const DEEPSEEK_NAME_END: &str = "<｜tool▁sep｜>";

/// What a model writes of one call.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: &'a RawValue,
}

impl CallFormat {
    /// The notation of a template, if it has one that is known.
    pub(super) fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if harmony::IN_TEMPLATES.iter().all(|mark| has(mark)) {
            return Some(Self::Harmony);
        }
        // Notations with these are others, though they share a mark.
        if ["<function=", "<arg_key>"].iter().any(|mark| has(mark)) {
            return None;
        }
        if has("<tool_call>") {
            Some(Self::Hermes)
        } else if has(MISTRAL_CALLS) {
            Some(if has(MISTRAL_ARGUMENTS) { Self::MistralArgs } else { Self::Mistral })
        } else if has(GRANITE_CALLS) {
            Some(Self::Granite)
        } else if has(DEEPSEEK_CALLS) {
            Some(if has("```json") { Self::DeepSeek } else { Self::DeepSeekBare })
        } else if has("tools") && has("ipython") && has("parameters") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// What begins a call within an answer; `None` if the answer begins with a call, by a brace.
    pub(super) fn opens(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("<tool_call>"),
            Self::Mistral | Self::MistralArgs => Some(MISTRAL_CALLS),
            Self::Granite => Some(GRANITE_CALLS),
            Self::DeepSeek | Self::DeepSeekBare => Some(DEEPSEEK_CALLS),
            Self::Llama | Self::Harmony => None,
        }
    }

    /// What ends a call; `None`: the end of the answer.
    pub(super) fn closes(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("</tool_call>"),
            Self::DeepSeek | Self::DeepSeekBare => Some(DEEPSEEK_CALLS_END),
            Self::Llama | Self::Mistral | Self::MistralArgs | Self::Granite | Self::Harmony => None,
        }
    }

    /// Spellings of control tokens that calls consist of.
    fn controls(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Llama => &[],
            Self::Mistral => &[MISTRAL_CALLS],
            Self::MistralArgs => &[MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS],
            Self::Granite => &[GRANITE_CALLS],
            Self::DeepSeek | Self::DeepSeekBare => {
                &[DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_NAME_END]
            }
            Self::Harmony => &harmony::MARKS,
        }
    }

    /// Spellings of what may be a control token, and is shown in text that is parsed.
    pub(super) fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            _ => self.controls(),
        }
    }

    /// What stands before and after the arguments of a call.
    pub fn around_arguments(self, name: &str) -> (String, String) {
        match self {
            Self::Hermes => (format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": "), "}\n</tool_call>".into()),
            Self::Llama => (format!("{{\"name\": \"{name}\", \"parameters\": "), "}".into()),
            Self::Mistral | Self::Granite => (format!("{{\"name\": \"{name}\", \"arguments\": "), "}".into()),
            Self::MistralArgs => (format!("{MISTRAL_CALLS}{name}{MISTRAL_ARGUMENTS}"), String::new()),
            Self::DeepSeek => (
                format!("{DEEPSEEK_CALL}function{DEEPSEEK_NAME_END}{name}\n```json\n"),
                format!("\n```{DEEPSEEK_CALL_END}"),
            ),
            Self::DeepSeekBare => (format!("{DEEPSEEK_CALL}{name}{DEEPSEEK_NAME_END}"), DEEPSEEK_CALL_END.into()),
            Self::Harmony => harmony::around_arguments(name),
        }
    }

    /// What stands before all calls, between two (`None`: an answer has one), and behind all.
    pub fn around_calls(self) -> (&'static str, Option<&'static str>, &'static str) {
        match self {
            Self::Hermes => ("", Some("\n"), ""),
            Self::Llama => ("", Some("; "), ""),
            Self::Mistral => ("[TOOL_CALLS] [", Some(", "), "]"),
            Self::MistralArgs => ("", Some(""), ""),
            Self::Granite => ("<|tool_call|>[", Some(", "), "]"),
            Self::DeepSeek => (DEEPSEEK_CALLS, Some("\n"), DEEPSEEK_CALLS_END),
            Self::DeepSeekBare => (DEEPSEEK_CALLS, Some(""), DEEPSEEK_CALLS_END),
            Self::Harmony => ("", None, ""),
        }
    }

    /// The parts of what [`CallFormat::around_calls`] or [`CallFormat::around_arguments`] gave.
    pub fn parts(self, notation: &str) -> Vec<NotationPart<'_>> {
        let (mut parts, mut rest) = (Vec::new(), notation);
        while !rest.is_empty() {
            let next = self.controls().iter().filter_map(|control| Some((rest.find(control)?, control.len()))).min();
            let (at, len) = next.unwrap_or((rest.len(), 0));
            let (text, control) = (&rest[..at], &rest[at..at + len]);
            parts.extend((!text.is_empty()).then_some(NotationPart::Text(text)));
            parts.extend((len > 0).then_some(NotationPart::Control(control)));
            rest = &rest[at + len..];
        }
        parts
    }

    /// Whether a text before [`CallFormat::closes`] is the beginning of a call, which goes on: the mark stands in a text of its arguments.
    pub(super) fn goes_on(self, text: &str) -> bool {
        // The marks of others are control tokens, which no text is.
        self == Self::Hermes
            && serde_json::from_str::<serde::de::IgnoredAny>(text.trim_start()).is_err_and(|error| error.is_eof())
    }

    /// The calls in the text between [`CallFormat::opens`] and [`CallFormat::closes`]; `None` if it is none, or calls no known tool.
    pub(super) fn read(self, text: &str, is_tool: impl Fn(&str) -> bool) -> Option<Vec<Call>> {
        let text = text.trim();
        let calls = match self {
            Self::Hermes => vec![written(serde_json::from_str(text).ok()?)?],
            Self::Mistral | Self::Granite => {
                let all: Vec<Written<'_>> = serde_json::from_str(text).ok()?;
                all.into_iter().map(written).collect::<Option<_>>()?
            }
            Self::MistralArgs => named(text)?,
            Self::Llama => objects(text)?,
            Self::DeepSeek | Self::DeepSeekBare => self.between_controls(text)?,
            Self::Harmony => return None,
        };
        (!calls.is_empty() && calls.iter().all(|call| is_tool(&call.name))).then_some(calls)
    }

    /// DeepSeek's calls, one behind the other.
    fn between_controls(self, text: &str) -> Option<Vec<Call>> {
        let (mut calls, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let (call, after) = rest.strip_prefix(DEEPSEEK_CALL)?.split_once(DEEPSEEK_CALL_END)?;
            let (before, behind) = call.split_once(DEEPSEEK_NAME_END)?;
            let (name, text) = match self {
                Self::DeepSeek => {
                    let (name, block) = behind.split_once('\n')?;
                    (name, block.trim().strip_prefix("```json")?.strip_suffix("```")?)
                }
                _ => (before, behind),
            };
            calls.push(Call { name: name.trim().to_owned(), arguments: arguments(text.trim())? });
            rest = after.trim_start();
        }
        Some(calls)
    }
}

fn written(Written { name, arguments: text }: Written<'_>) -> Option<Call> {
    Some(Call { name, arguments: arguments(text.get())? })
}

/// Llama's: objects with `;` between them, which strings may contain as well.
fn objects(text: &str) -> Option<Vec<Call>> {
    let (mut all, mut rest) = (Vec::new(), text);
    loop {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Written<'_>>();
        all.push(written(values.next()?.ok()?)?);
        rest = rest[values.byte_offset()..].trim_start();
        match rest.strip_prefix(';') {
            Some(more) => rest = more.trim_start(),
            None if rest.is_empty() => return Some(all),
            None => return None,
        }
    }
}

/// Mistral's: names with arguments behind them, and a mark before each but the first.
fn named(text: &str) -> Option<Vec<Call>> {
    let (mut all, mut rest) = (Vec::new(), text);
    loop {
        let (name, behind) = rest.split_once(MISTRAL_ARGUMENTS)?;
        let name = name.split_once(MISTRAL_ID).map_or(name, |(name, _)| name);
        let mut values = serde_json::Deserializer::from_str(behind).into_iter::<&RawValue>();
        let written = values.next()?.ok()?;
        all.push(Call { name: name.trim().to_owned(), arguments: arguments(written.get())? });
        rest = behind[values.byte_offset()..].trim_start();
        match rest.strip_prefix(MISTRAL_CALLS) {
            Some(more) => rest = more,
            None if rest.is_empty() => return Some(all),
            None => return None,
        }
    }
}

/// The text of an object; some models write the object as a text.
pub(super) fn arguments(text: &str) -> Option<String> {
    let object = if text.starts_with('"') { serde_json::from_str(text).ok()? } else { text.to_owned() };
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&object).is_ok().then_some(object)
}
