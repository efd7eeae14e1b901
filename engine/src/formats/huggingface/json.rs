//! JSON files of a model folder: read completely up to a size limit, with accessors per key so that messages name file and key.

use crate::families::Activation;
use crate::formats::WeightsError;
use crate::formats::mmap::open_regular;
use serde_json::{Map, Value};
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Largest configuration file; real ones have a few kilobytes, an index of shards a few hundred.
pub(super) const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Largest `tokenizer.json`; the largest known ones have about 35 MB.
pub(super) const TOKENIZER_BYTES_MAX: u64 = 256 << 20;

/// A file's text; `None` if the file does not exist.
pub(super) fn read_text(path: &Path, bytes_max: u64) -> Result<Option<String>, WeightsError> {
    let shown = path.display().to_string();
    let io = |source| WeightsError::Io { path: shown.clone(), source };
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(WeightsError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > bytes_max {
        return Err(WeightsError::damaged(&shown, format!("it is larger than {bytes_max} bytes")));
    }
    String::from_utf8(bytes).map(Some).map_err(|_| WeightsError::damaged(&shown, "it is not UTF-8"))
}

/// One JSON object and the path that messages name.
#[derive(Clone, Debug)]
pub(crate) struct JsonObject {
    path: String,
    keys: Map<String, Value>,
}

impl JsonObject {
    /// Reads a file that holds one object; `None` if the file does not exist.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, WeightsError> {
        let Some(text) = read_text(path, CONFIG_BYTES_MAX)? else { return Ok(None) };
        let path = path.display().to_string();
        match serde_json::from_str(&text) {
            Ok(Value::Object(keys)) => Ok(Some(Self { path, keys })),
            Ok(_) => Err(WeightsError::damaged(&path, "it is no JSON object")),
            Err(error) => Err(WeightsError::damaged(&path, format!("it is no JSON: {error}"))),
        }
    }

    /// An object in memory, without a path; `None` if the bytes are not an object.
    pub(crate) fn parse(json: &[u8]) -> Option<Self> {
        Some(Self { path: String::new(), keys: serde_json::from_slice(json).ok()? })
    }

    pub(crate) fn keys(&self) -> &Map<String, Value> {
        &self.keys
    }

    pub(crate) fn damaged(&self, message: impl Into<String>) -> WeightsError {
        WeightsError::damaged(&self.path, message)
    }

    pub(crate) fn unsupported(&self, what: impl Into<String>, hint: impl Into<String>) -> WeightsError {
        WeightsError::unsupported(&self.path, what, hint)
    }

    /// The value; `null` counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        kind: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WeightsError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.damaged(format!("{key} is no {kind}")))
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, WeightsError> {
        self.typed(key, "whole number", |value| usize::try_from(value.as_u64()?).ok())
    }

    /// Tokens of a sliding window; `None` if the key is absent or null.
    pub(crate) fn window(&self, key: &str) -> Result<Option<u32>, WeightsError> {
        self.typed(key, "number of tokens", |value| u32::try_from(value.as_u64()?).ok())
    }

    pub(crate) fn whole(&self, key: &str) -> Result<Option<i64>, WeightsError> {
        self.typed(key, "whole number", Value::as_i64)
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, WeightsError> {
        self.typed(key, "number", |value| value.as_f64().map(|x| x as f32))
    }

    pub(crate) fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, WeightsError> {
        let number = |value: &Value| value.as_f64().map(|x| x as f32);
        self.typed(key, "list of numbers", |value| value.as_array()?.iter().map(number).collect())
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, WeightsError> {
        self.typed(key, "boolean", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, WeightsError> {
        self.typed(key, "text", Value::as_str)
    }

    /// An activation by its name in transformers.
    pub(crate) fn activation(&self, key: &str) -> Result<Option<Activation>, WeightsError> {
        Ok(Some(match self.text(key)? {
            None => return Ok(None),
            Some("silu" | "swish") => Activation::Silu,
            Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeluTanh,
            Some(other) => {
                let hint = "`silu` and `gelu_pytorch_tanh` are implemented";
                return Err(self.unsupported(format!("{key} `{other}`"), hint));
            }
        }))
    }

    /// An object inside this one, with the path extended by its key.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, WeightsError> {
        let keys = self.typed(key, "object", Value::as_object)?;
        Ok(keys.map(|keys| Self { path: format!("{}: {key}", self.path), keys: keys.clone() }))
    }

    /// The object in `key`, with some keys of this one beside its own. None may be there in both with different values.
    pub(crate) fn inner(&self, key: &str, shared: &[&str]) -> Result<Self, WeightsError> {
        let mut inner = self.need(key, self.object(key)?)?;
        for name in shared {
            let Some(outer) = self.get(name) else { continue };
            match inner.get(name) {
                Some(own) if own != outer => {
                    return Err(self.damaged(format!("{name} is {outer} and in {key} {own}")));
                }
                _ => _ = inner.keys.insert((*name).to_owned(), outer.clone()),
            }
        }
        Ok(inner)
    }

    /// The same object, with this value of a key.
    pub(crate) fn with(mut self, key: &str, value: Value) -> Self {
        self.keys.insert(key.to_owned(), value);
        self
    }

    /// The value, or an error if it is absent.
    pub(crate) fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, WeightsError> {
        value.ok_or_else(|| self.damaged(format!("{key} is missing")))
    }
}

/// Whether a value switches its key's feature off: null, false, zero, or empty.
pub(crate) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_refused_before_it_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("config.json");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let refused = |error: WeightsError| {
            let message = error.to_string();
            assert!(message.contains("config.json: not a regular file"), "{message}");
        };
        refused(read_text(&fifo, CONFIG_BYTES_MAX).unwrap_err());
        refused(crate::formats::mmap::MappedFile::open(&fifo).unwrap_err());
        assert_eq!(read_text(&folder.path().join("none.json"), CONFIG_BYTES_MAX).unwrap(), None);
    }
}
