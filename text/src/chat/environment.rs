//! The Jinja environment in which templates run: that of Hugging Face, with limits.

use chrono::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use std::fmt::Write as _;
use std::io;
use std::time::SystemTime;

use super::json::Layout;
use super::marks::Marks;
use super::source::Source;
use crate::TextError;
use crate::tokenizer::control::Controls;

/// Most template instructions of one rendering; a long chat takes a few hundred per message.
const FUEL_MAX: u64 = 5_000_000;
/// Deepest nesting of macros and loops.
const RECURSION_MAX: usize = 200;
/// Longest rendered prompt, in bytes.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Widest indentation of `tojson`.
const INDENT_MAX: usize = 16;

const NAME: &str = "chat_template";

/// A template with the control tokens of its source marked. Limits on fuel, nesting and output bound the cost of a long
/// or malicious chat. Memory that a template itself builds in its variables is not bounded: the library has no limit for
/// it. On a worker the template comes from the operator who chose the model, on a router from a worker, which is trusted
/// not to end the router by it (docs/security.md).
pub(super) struct Compiled(Environment<'static>);

impl Compiled {
    pub(super) fn new(source: &Source, controls: &Controls, marks: &Marks) -> Result<Self, TextError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| TextError::TemplateSyntax(e.to_string()))?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_fuel(Some(FUEL_MAX));
        env.set_recursion_limit(RECURSION_MAX);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "refused").with_source(Refusal(message)))
        });
        env.add_filter("tojson", tojson);
        // Jinja cannot iterate over none, and templates use this test to distinguish none from a list of parts.
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        let marked = source.map_output(|text| marks.mark(text, controls));
        env.add_template_owned(NAME, marked).map_err(|e| TextError::TemplateSyntax(e.to_string()))?;
        Ok(Self(env))
    }

    /// Renders; `strftime_now` returns `now`.
    pub(super) fn render(&self, arguments: Vec<(Value, Value)>, now: SystemTime) -> Result<String, TextError> {
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let strftime_now = Value::from_function(move |format: String| strftime(seconds, &format));
        let arguments = arguments.into_iter().chain([(Value::from("strftime_now"), strftime_now)]);
        let template = self.0.get_template(NAME).map_err(failure)?;
        let mut output = Bounded(Vec::new());
        let result = template.render_captured_to(Value::from_pairs(arguments), &mut output).map(drop);
        if output.is_full() {
            return Err(TextError::TemplateTooLong("64 MiB of prompt"));
        }
        result.map_err(failure)?;
        String::from_utf8(output.0).map_err(|e| TextError::TemplateFailed(e.to_string()))
    }
}

/// The argument of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn failure(error: Error) -> TextError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(cause) = source {
        if let Some(Refusal(message)) = cause.downcast_ref() {
            return TextError::Refused(message.clone());
        }
        if cause.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return TextError::TemplateTooLong("5 million template instructions");
        }
        source = cause.source();
    }
    TextError::TemplateFailed(error.to_string())
}

/// `tojson` as Hugging Face defines it: Python's `json.dumps`, nothing escaped for HTML.
fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = indent.or(options.get("indent")?).map(|i| i.min(INDENT_MAX));
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let layout = Layout {
        indent,
        item_separator,
        key_separator,
        sort_keys: sort_keys.unwrap_or(false),
        ensure_ascii: ensure_ascii.unwrap_or(false),
    };
    Ok(Value::from(layout.dump(value)?))
}

fn strftime(unix_seconds: u64, format: &str) -> Result<String, Error> {
    let time = i64::try_from(unix_seconds).ok().and_then(|s| DateTime::from_timestamp(s, 0));
    let mut text = String::new();
    match time.map(|time| write!(text, "{}", time.format(format))) {
        Some(Ok(())) => Ok(text),
        _ => Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know the format {format:?}"))),
    }
}

/// A buffer that accepts at most [`OUTPUT_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Bounded {
    fn is_full(&self) -> bool {
        self.0.len() > OUTPUT_BYTES_MAX
    }
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = (OUTPUT_BYTES_MAX + 1).saturating_sub(self.0.len());
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if self.is_full() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
