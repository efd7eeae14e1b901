//! Errors of opening and reading a model.

/// A model that cannot be served, with the tensor or key at fault.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("cannot read {path}: {source}")]
    Io {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// The file is damaged or truncated, or its sizes are inconsistent.
    #[error("{path}: {message}")]
    Damaged {
        path: String,
        /// What does not fit, with the tensor or key.
        message: String,
    },
    /// The file is valid, but something in it is not implemented.
    #[error("{path}: {what} is not supported: {hint}")]
    Unsupported {
        path: String,
        /// The key or the tensor that is not supported.
        what: String,
        /// What would work instead.
        hint: String,
    },
    /// The value of `--model` is not understood.
    #[error("{0}")]
    Spec(String),
}

impl WeightsError {
    pub(crate) fn damaged(path: &str, message: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), message: message.into() }
    }

    pub(crate) fn unsupported(path: &str, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), what: what.into(), hint: hint.into() }
    }
}
