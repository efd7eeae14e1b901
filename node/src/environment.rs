//! Variables that are not Baton's own but that users expect every program of their kind to honour.

use std::path::PathBuf;

/// The user's cache folder: `XDG_CACHE_HOME`, else `.cache` in the home folder; `None` where there is no home.
pub fn cache_home() -> Option<PathBuf> {
    let set = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    set.or_else(|| std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache")))
}

/// Base address of the model hub where one is set: `HF_ENDPOINT`.
pub fn hub_endpoint() -> Option<String> {
    std::env::var("HF_ENDPOINT").ok().filter(|url| !url.is_empty())
}

/// Token for the model hub where one is set: `HF_TOKEN`.
pub fn hub_token() -> Option<String> {
    std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty())
}
