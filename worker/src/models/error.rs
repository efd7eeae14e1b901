//! Why a model cannot be opened.

use baton_engine::formats::WeightsError;
use std::path::PathBuf;

/// A model that cannot be found, downloaded or opened. The operator has to fix it, except if the hub is unreachable.
#[derive(Debug, thiserror::Error)]
pub enum ModelsError {
    /// Found, but not supported.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// `model` is neither a path nor a hub id nor a known name.
    #[error(
        "model `{model}`: {problem}; give a path to a .gguf file or a model folder, a hub id `org/name[@revision]`, \
         `smollm2-135m-instruct`, or `random:...`"
    )]
    Spec {
        /// The setting as it was given.
        model: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The default model has not been fetched.
    #[error("the default model is not at {path}: run `make model` or `scripts/fetch-model --cache-dir {cache}` once")]
    NotFetched {
        /// Where it should be.
        path: PathBuf,
        cache: PathBuf,
    },
    /// Fetching the default model failed; the script has printed the reason to stderr.
    #[error("the default model could not be fetched: {0}")]
    Fetch(String),
    /// No cache folder is configured and there is no home folder.
    #[error("there is no home folder to keep models in: set cache_dir")]
    NoCache,
    /// The hub refused the request.
    #[error("{url}: {problem}")]
    Hub {
        /// URL of the request.
        url: String,
        /// The hub's answer, and what to do.
        problem: String,
    },
    /// The hub cannot be reached, or the connection broke more often than is tolerated. Another run resumes the download.
    #[error(
        "{url}: {source}; check network, proxy and hub_endpoint, then run again: the download resumes where it stopped"
    )]
    Network {
        /// URL of the request.
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The cache cannot be written or read.
    #[error("cannot write {path}: {source}")]
    Cache {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Another process holds the lock of a download.
    #[error("another process has held {path} for {waited_s} s: is it stuck?")]
    Locked {
        path: PathBuf,
        /// How long this process waited.
        waited_s: u64,
    },
}

impl ModelsError {
    /// Whether the model itself is complete and the engine does not support it.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Weights(WeightsError::Unsupported { .. }))
    }

    pub(super) fn cache(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Cache { path, source }
    }
}
