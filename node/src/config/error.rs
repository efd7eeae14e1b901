//! What is wrong with a configuration, and where it was set.

use figment::error::Kind;
use std::path::PathBuf;

/// Why a configuration was refused. Each message names the key and its origin: a file, a variable or a flag.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}")]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is not TOML.
    #[error("{path} is not valid TOML: {problem}")]
    Syntax {
        path: PathBuf,
        /// Line, column and problem.
        problem: String,
    },
    /// A key that this process does not know.
    #[error("unknown key `{key}`, from {origin}; known here: {known}")]
    UnknownKey {
        /// Full path of the key.
        key: String,
        /// Where it was set.
        origin: String,
        /// The keys of that section.
        known: String,
    },
    /// A value of the wrong type or form.
    #[error("bad value of `{key}`, from {origin}: {problem}")]
    Value {
        /// Full path of the key.
        key: String,
        /// Where it was set.
        origin: String,
        problem: String,
    },
    /// Values out of their range, all of them.
    #[error("{}", .0.join("\n"))]
    OutOfRange(Vec<String>),
    /// The tree has no TOML form.
    #[error("cannot print the configuration: {0}")]
    Dump(String),
}

impl ConfigError {
    pub(super) fn out_of_range(problems: Vec<(String, String)>, origin: impl Fn(&str) -> String) -> Self {
        let line = |(key, problem): (String, String)| format!("bad value of `{key}`, from {}: {problem}", origin(&key));
        Self::OutOfRange(problems.into_iter().map(line).collect())
    }
}

impl From<figment::Error> for ConfigError {
    fn from(error: figment::Error) -> Self {
        let key = error.path.join(".");
        let profile = error.profile.clone().unwrap_or_default();
        let origin =
            error.metadata.as_ref().map_or_else(|| "the defaults".into(), |m| m.interpolate(&profile, &error.path));
        match error.kind {
            Kind::UnknownField(_, known) => Self::UnknownKey { key, origin, known: known.join(", ") },
            kind => Self::Value { key, origin, problem: kind.to_string() },
        }
    }
}
