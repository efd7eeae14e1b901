//! Why a trace cannot be read.

use std::path::PathBuf;

/// An error in a trace; each message states the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file cannot be read, or is not text.
    #[error("cannot read {path}; give --trace a text file: JSON lines or CSV")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Longer than any trace should be.
    #[error("the trace has over {gib_max} GiB; cut it into several files")]
    Size { gib_max: u64 },
    /// The first line is of neither format.
    #[error(
        "the first line is neither a JSON object with `timestamp` nor a header with TIMESTAMP,ContextTokens,GeneratedTokens; \
         correct it, or set --format"
    )]
    Format,
    /// A line that violates its format. Lines count from 1.
    #[error("line {line}: {problem}")]
    Line { line: usize, problem: String },
    /// It has no request.
    #[error("the trace has no requests; give another file")]
    Empty,
    /// More requests than are held in memory.
    #[error("the trace holds over {max} requests; cut it into several files")]
    Requests { max: usize },
}
