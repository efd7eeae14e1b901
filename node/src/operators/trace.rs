//! The spans of a request, from the router and the workers that took part.

use std::collections::BTreeMap;

#[derive(Clone, Debug, Default)]
pub struct RequestTrace {
    /// Id of the trace as 32 hexadecimal digits.
    pub trace_id: String,
    /// Spans of each process, the router's first.
    pub processes: Vec<ProcessSpans>,
    /// Workers that took part and did not answer, with the reason.
    pub silent: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct ProcessSpans {
    /// `router`, or the worker as `name@incarnation`.
    pub process: String,
    pub spans: Vec<Span>,
}

#[derive(Clone, Debug, Default)]
pub struct Span {
    /// Id of the span, 8 bytes.
    pub id: Vec<u8>,
    /// Empty for a root.
    pub parent_id: Vec<u8>,
    pub name: String,
    /// Nanoseconds since 1970, by the clock of the process.
    pub start_ns: u64,
    pub end_ns: u64,
    pub failed: bool,
    pub attributes: BTreeMap<String, String>,
}
