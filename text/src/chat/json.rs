//! Converts JSON to template values, and back as Python writes it.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use serde_json::{Map, Number};

/// A JSON value for a template, with `text` applied to every string. Keys that are identifiers are names of the
/// protocol and stay unchanged.
pub(super) fn to_template(value: &serde_json::Value, text: &dyn Fn(&str) -> String) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(b) => Value::from(*b),
        serde_json::Value::Number(n) => number(n),
        serde_json::Value::String(s) => Value::from(text(s)),
        serde_json::Value::Array(items) => items.iter().map(|item| to_template(item, text)).collect(),
        serde_json::Value::Object(map) => Value::from_pairs(entries(map, text)),
    }
}

/// The entries of a JSON object for a template, as in [`to_template`].
pub(super) fn entries<'a>(
    map: &'a Map<String, serde_json::Value>,
    text: &'a dyn Fn(&str) -> String,
) -> impl Iterator<Item = (String, Value)> + 'a {
    let name = |key: &str| if is_identifier(key) { key.to_owned() } else { text(key) };
    map.iter().map(move |(key, value)| (name(key), to_template(value, text)))
}

fn number(n: &Number) -> Value {
    match (n.as_i64(), n.as_u64(), n.as_f64()) {
        (Some(i), _, _) => Value::from(i),
        (_, Some(u), _) => Value::from(u),
        (_, _, f) => Value::from(f.unwrap_or(f64::NAN)),
    }
}

fn is_identifier(key: &str) -> bool {
    key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Visits every string and key of a value.
pub(super) fn visit(value: &serde_json::Value, see: &mut dyn FnMut(&str)) {
    match value {
        serde_json::Value::String(s) => see(s),
        serde_json::Value::Array(items) => items.iter().for_each(|item| visit(item, see)),
        serde_json::Value::Object(map) => visit_map(map, see),
        _ => {}
    }
}

/// Visits every string and key of an object.
pub(super) fn visit_map(map: &Map<String, serde_json::Value>, see: &mut dyn FnMut(&str)) {
    for (key, value) in map {
        see(key);
        visit(value, see);
    }
}

/// A value as Python's `json.dumps(…, ensure_ascii=False)` writes it.
pub(super) fn python(value: &serde_json::Value) -> String {
    let (item_separator, key_separator) = (", ".to_owned(), ": ".to_owned());
    let layout = Layout { indent: None, item_separator, key_separator, sort_keys: false, ensure_ascii: false };
    layout.dump(&to_template(value, &str::to_owned)).unwrap_or_else(|_| value.to_string())
}

/// Format of Python's `json.dumps`.
pub(super) struct Layout {
    pub(super) indent: Option<usize>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
    pub(super) ensure_ascii: bool,
}

impl Layout {
    pub(super) fn dump(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number_text(value)),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.write_all(['[', ']'], items, depth, out)?;
            }
            ValueKind::Map => {
                let keys: Vec<Value> = value.try_iter()?.collect();
                let mut items = Vec::with_capacity(keys.len());
                for key in keys {
                    items.push((Some(key.to_string()), value.get_item(&key)?));
                }
                if self.sort_keys {
                    items.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.write_all(['{', '}'], items, depth, out)?;
            }
            kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson cannot write {kind}"))),
        }
        Ok(())
    }

    fn write_all(
        &self,
        [open, close]: [char; 2],
        items: Vec<(Option<String>, Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(open);
        let empty = items.is_empty();
        for (i, (key, item)) in items.into_iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            line(depth + 1, out);
            if let Some(key) = key {
                self.write_string(&key, out);
                out.push_str(&self.key_separator);
            }
            self.write(&item, depth + 1, out)?;
        }
        if !empty {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && !c.is_ascii() => {
                    let units =
                        c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
                    out.push_str(&units);
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Integers unchanged, floats as Python's `repr`: exponents from 1e16 up and below 1e-4, with at least two digits.
fn number_text(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(f) = f64::try_from(value.clone()) else { return value.to_string() };
    if f.is_nan() {
        return "NaN".to_owned();
    }
    if f.is_infinite() {
        return if f > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if f == 0.0 || (1e-4..1e16).contains(&f.abs()) {
        return format!("{f:?}");
    }
    let text = format!("{f:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
    format!("{digits}e{sign}{size:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dumps_as_python_does() {
        let layout = |indent, item: &str, sort_keys| Layout {
            indent,
            item_separator: item.to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys,
            ensure_ascii: indent.is_none() && item == ",",
        };
        let value = json!({"b": [1, -2.5, 1e16, 1e22, 1.5e-7, 0.0001, 100.0], "a": {"é<'>": "x\n\u{1}\"\\"}, "n": null, "e": [], "t": true});
        let value = to_template(&value, &str::to_owned);
        assert_eq!(
            layout(None, ", ", false).dump(&value).unwrap(),
            r#"{"b": [1, -2.5, 1e+16, 1e+22, 1.5e-07, 0.0001, 100.0], "a": {"é<'>": "x\n\u0001\"\\"}, "n": null, "e": [], "t": true}"#
        );
        let value = to_template(&json!(["é🦀", 1]), &str::to_owned);
        assert_eq!(layout(None, ",", false).dump(&value).unwrap(), r#"["\u00e9\ud83e\udd80",1]"#);
        let value = to_template(&json!({"b": [1], "a": {}}), &str::to_owned);
        assert_eq!(layout(Some(2), ",", true).dump(&value).unwrap(), "{\n  \"a\": {},\n  \"b\": [\n    1\n  ]\n}");
    }
}
