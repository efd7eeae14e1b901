//! Spans as a router collects them.

use crate::operators::{ProcessSpans, RequestTrace, Span};

/// A span between two times, in microseconds; parent 0 is none.
pub fn span(id: u8, parent: u8, name: &str, start_us: u64, end_us: u64) -> Span {
    Span {
        id: vec![id; 8],
        parent_id: if parent == 0 { Vec::new() } else { vec![parent; 8] },
        name: name.into(),
        start_ns: 1_700_000_000_000_000_000 + start_us * 1_000,
        end_ns: 1_700_000_000_000_000_000 + end_us * 1_000,
        ..Default::default()
    }
}

/// A trace of these spans of processes.
pub fn response(processes: Vec<(&str, Vec<Span>)>) -> RequestTrace {
    let processes =
        processes.into_iter().map(|(process, spans)| ProcessSpans { process: process.into(), spans }).collect();
    RequestTrace { trace_id: "ab".repeat(16), processes, silent: Vec::new() }
}
