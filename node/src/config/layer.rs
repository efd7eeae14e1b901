//! The layers over the defaults; each knows where it sets a key.

use super::{ConfigError, ENV_PREFIX, Overlay};
use crate::environment::API_KEY_VARIABLE;
use figment::value::{Dict, Map, Tag, Value};
use figment::{Error, Figment, Metadata, Profile, Provider};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Names the file; not a configuration key.
pub(super) const FILE_VARIABLE: &str = "BATON_CONFIG";

/// One layer: its values, and the origin of each key.
pub(super) struct Layer {
    values: Dict,
    metadata: Metadata,
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        self.metadata.clone()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, Error> {
        Ok(Map::from([(Profile::Default, self.values.clone())]))
    }
}

impl Layer {
    pub(super) fn file(path: PathBuf) -> Result<Self, ConfigError> {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(source) => return Err(ConfigError::Read { path, source }),
        };
        let syntax = |problem: String| ConfigError::Syntax { path: path.clone(), problem };
        let table: toml::Table = toml::from_str(&text).map_err(|e| syntax(e.to_string()))?;
        let value = Value::serialize(table).map_err(|e| syntax(e.to_string()))?;
        let origin = format!("file {}", path.display());
        let metadata = Metadata::named("file").interpolater(move |_: &Profile, _: &[&str]| origin.clone());
        Ok(Self { values: value.into_dict().unwrap_or_default(), metadata })
    }

    pub(super) fn env(variables: &[(String, String)]) -> Result<Self, ConfigError> {
        let mut values = Dict::new();
        for (name, text) in variables {
            let other = [FILE_VARIABLE, API_KEY_VARIABLE].contains(&name.as_str());
            let Some(key) = name.strip_prefix(ENV_PREFIX).filter(|_| !other && !text.is_empty()) else { continue };
            let key = key.to_ascii_lowercase();
            // Lists and tables have figment's syntax, `[a, b]`; all else stays text, so that "1" can also name a pool.
            let structured = text.starts_with(['[', '{']);
            let Ok(parsed) = text.parse::<Value>();
            let value = if structured { parsed } else { Value::from(text.as_str()) };
            if !insert(&mut values, &key.split("__").collect::<Vec<_>>(), value) {
                let problem = "one variable sets a section, another a key of it".into();
                return Err(ConfigError::Value { key: key.replace("__", "."), origin: variable(&[&key]), problem });
            }
        }
        let metadata = Metadata::named("environment").interpolater(|_: &Profile, path: &[&str]| variable(path));
        Ok(Self { values, metadata })
    }
}

impl From<Overlay> for Layer {
    fn from(overlay: Overlay) -> Self {
        let mut values = Dict::new();
        let mut flags = BTreeMap::new();
        for (flag, key, value) in overlay.into_entries() {
            insert(&mut values, &key.split('.').collect::<Vec<_>>(), value);
            flags.insert(key, flag);
        }
        let origin = move |_: &Profile, path: &[&str]| match flags.get(path.join(".").as_str()) {
            Some(flag) => format!("flag {flag}"),
            None => "the flags".into(),
        };
        Self { values, metadata: Metadata::named("flags").interpolater(origin) }
    }
}

/// Where the effective value of `key` was set.
pub(super) fn origin(figment: &Figment, key: &str) -> String {
    let path: Vec<&str> = key.split('.').collect();
    match figment.find_metadata(key) {
        Some(metadata) if !metadata.name.contains("::") => metadata.interpolate(figment.profile(), &path),
        _ => "the defaults".into(),
    }
}

fn variable(path: &[&str]) -> String {
    format!("environment variable {ENV_PREFIX}{}", path.join("__").to_ascii_uppercase())
}

/// Inserts `value` at `path`; `false` if the path crosses a value, or a section would be replaced.
fn insert(values: &mut Dict, path: &[&str], value: Value) -> bool {
    match path {
        [] => false,
        [key] => values.insert((*key).into(), value).is_none(),
        [section, rest @ ..] => match values.entry((*section).into()).or_insert(Value::Dict(Tag::Default, Dict::new()))
        {
            Value::Dict(_, inner) => insert(inner, rest, value),
            _ => false,
        },
    }
}
