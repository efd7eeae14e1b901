//! Bodies become requests, within the memory budget.

use super::long;
use crate::config::READING_COSTS;
use crate::openai::Common;
use crate::request::Prompt;
use baton_node::intake::Hold;
use baton_types::{ErrorKind, RequestError};

/// Reads a body as a request.
pub(super) type Parser = fn(&[u8]) -> Result<(Prompt, Common), RequestError>;

/// Most memory of a parsed JSON value, with its key in an object: values take more than their text.
const VALUE_COSTS: u64 = 72;

/// Number of values of a JSON text, less one: those that follow `,`, `:`, `[` or `{` outside of strings.
fn values(json: &[u8]) -> u64 {
    let (mut in_string, mut escaped, mut count) = (false, false, 0);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b':' | b'[' | b'{' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// Parses a body as a request. The hold then counts the parsed request instead of the body.
pub(super) async fn parse(body: Vec<u8>, parser: Parser, hold: Hold) -> Result<((Prompt, Common), Hold), RequestError> {
    read(body, move |body, hold| parse_within(body, parser, hold), hold).await
}

/// As [`parse`], within the work of [`read`].
pub(super) fn parse_within(body: Vec<u8>, parser: Parser, hold: &mut Hold) -> Result<(Prompt, Common), RequestError> {
    let (prompt, common) = parser(&body)?;
    drop(body);
    // Its text needs no more memory than parsing it; the values of tools and calls do.
    let (held, values) = (hold.bytes(), prompt.value_bytes());
    let text = prompt.bytes() - values + common.parameters.model.len() as u64;
    hold.set(text.min(held) + values)?;
    Ok((prompt, common))
}

/// Has `parser` read a body, off the threads that serve connections if it is long. The hold counts what that takes.
pub(super) async fn read<T: Send + 'static>(
    body: Vec<u8>,
    parser: impl FnOnce(Vec<u8>, &mut Hold) -> Result<T, RequestError> + Send + 'static,
    mut hold: Hold,
) -> Result<(T, Hold), RequestError> {
    let length = body.len() as u64;
    hold.set(length * READING_COSTS)?;
    long::run(length, move || {
        let (values, most) = (values(&body), hold.most());
        let takes = length * READING_COSTS + values * VALUE_COSTS;
        if long::is_long(length) && takes > most {
            let message = format!(
                "reading this body takes {takes} bytes of memory, with {values} JSON values in it; one request may take {most}: send fewer values"
            );
            return Err(RequestError::new(ErrorKind::InvalidRequest, message));
        }
        hold.set(takes)?;
        Ok((parser(body, &mut hold)?, hold))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::values;

    #[test]
    fn values_are_counted_outside_of_strings() {
        for (json, expected) in [
            ("1", 0),
            (r#"{"a":[[0],[0]]}"#, 6),
            (r#"{"text":"a, b: [c] {d}"}"#, 2),
            (r#"["\\",1]"#, 2),
            (r#"["\"",1]"#, 2),
            (r#"["a\",:[b",1]"#, 2),
        ] {
            assert_eq!(values(json.as_bytes()), expected, "{json}");
        }
    }
}
