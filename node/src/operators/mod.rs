//! What a router tells operators: the state of its cluster, and the spans of recent requests in display order. The
//! command line prints it, and the router's page shows it.

mod notes;
mod status;
mod trace;
mod waterfall;

/// Colours of pages, light and dark: of text, and of what happens in a router, in prefill and in decode.
pub const PALETTE: &str = include_str!("palette.css");

pub use notes::ms;
pub use status::{BlockCounts, ClusterStatus, Problem, RouterStatus, WorkerStatus};
pub use trace::{ProcessSpans, RequestTrace, Span};
pub use waterfall::{Row, Waterfall};
