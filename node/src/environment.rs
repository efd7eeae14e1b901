//! Standard environment variables that this program honours, and the names of Baton's own.

use crate::config::{ENV_PREFIX, Secret};
use std::path::PathBuf;

/// Holds the key with which the command line calls a router; it is not configuration.
pub const API_KEY_VARIABLE: &str = "BATON_API_KEY";

/// Names of the variables that set configuration (`BATON_*`); an empty one counts as unset.
pub fn own() -> Vec<String> {
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    let names = set.map(|(name, _)| name.to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(ENV_PREFIX) && name != API_KEY_VARIABLE).collect()
}

/// The API key for calls to a router, if set: `BATON_API_KEY`.
pub fn api_key() -> Option<Secret> {
    std::env::var(API_KEY_VARIABLE).ok().filter(|key| !key.is_empty()).map(Secret::new)
}

/// The folder with the certificate of a router's client ports, where it is given to its process.
pub fn tls_folder() -> Option<PathBuf> {
    std::env::var_os("BATON_TLS__DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// The user's cache folder: `XDG_CACHE_HOME`, else `.cache` in the home folder; `None` without a home folder.
pub fn cache_home() -> Option<PathBuf> {
    let set = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    set.or_else(|| std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache")))
}

/// The user's folder for state that persists between runs: `XDG_STATE_HOME`, else `.local/state` in the home folder;
/// `None` without a home folder.
pub fn state_home() -> Option<PathBuf> {
    let set = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    set.or_else(|| std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".local/state")))
}

/// Base address of the model hub, if set: `HF_ENDPOINT`.
pub fn hub_endpoint() -> Option<String> {
    std::env::var("HF_ENDPOINT").ok().filter(|url| !url.is_empty())
}

/// Token for the model hub, if set: `HF_TOKEN`.
pub fn hub_token() -> Option<String> {
    std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty())
}
