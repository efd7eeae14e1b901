//! Short notes on a span besides its time; the same in the terminal and on pages.

use super::waterfall::Row;

/// Notes on one span: bytes and rate of a transfer and the part of it that did not overlap with compute, the worker that was called,
/// errors.
pub(super) fn of(row: &Row) -> String {
    let mut notes = Vec::new();
    if let Some(worker) = row.get("baton.worker") {
        notes.push(format!("-> {}", worker.rsplit_once('@').map_or(worker, |(name, _)| name)));
    }
    if let Some(attempt) = row.number("baton.attempt").filter(|attempt| *attempt > 0.0) {
        notes.push(format!("attempt {}", attempt + 1.0));
    }
    if let Some(reason) = row.get("baton.placement.reason").filter(|_| row.depth > 0) {
        notes.push(reason.to_owned());
    }
    if let Some(bytes) = row.number("baton.kv.bytes").filter(|_| row.depth > 0) {
        notes.push(size(bytes));
    }
    if let Some(transport) = row.get("baton.kv.transport") {
        notes.push(transport.to_owned());
    }
    if let Some(rate) = row.number("baton.kv.gb_per_s") {
        let over = row.number("baton.kv.moving_ms").map(|ms| format!(" over {ms:.2} ms")).unwrap_or_default();
        notes.push(format!("{rate:.2} GB/s{over}"));
    }
    if let Some(exposed) = row.number("baton.kv.exposed_ms").filter(|_| row.depth > 0) {
        notes.push(format!("exposed {exposed:.2} ms"));
    }
    if let Some(tokens) = row.get("baton.prompt_tokens") {
        notes.push(format!("{tokens} tokens in"));
    }
    if let Some(tokens) = row.get("gen_ai.usage.output_tokens").filter(|_| row.depth > 0) {
        notes.push(format!("{tokens} tokens out"));
    }
    if let Some(error) = row.get("error.type") {
        notes.push(format!("failed: {error}"));
    } else if row.failed {
        notes.push("failed".into());
    }
    notes.join(", ")
}

/// Notes on the whole request, one fact per entry.
pub(super) fn of_request(trace_id: &str, rows: &[Row]) -> Vec<String> {
    let mut facts = vec![format!("trace {trace_id}")];
    let requests = || rows.iter().filter(|row| row.get("gen_ai.response.id").is_some());
    let (Some(root), None) = (requests().next(), requests().nth(1)) else {
        match requests().count() {
            0 => facts.push("the request itself has not ended yet, or its span is gone".into()),
            several => facts.push(format!("{several} requests")),
        }
        return facts;
    };
    facts.insert(0, format!("request {}", root.get("gen_ai.response.id").unwrap_or_default()));
    facts.extend(root.get("gen_ai.response.model").map(|model| format!("model {model}")));
    let tokens = |key: &str| root.get(key).unwrap_or("0").to_owned();
    let (input, output) = (tokens("gen_ai.usage.input_tokens"), tokens("gen_ai.usage.output_tokens"));
    facts.push(format!("{input} tokens in ({} cached), {output} out", tokens("baton.cached_tokens")));
    facts.extend(root.number("baton.ttft_ms").map(|ms| format!("first token after {ms:.2} ms")));
    facts.extend(root.get("baton.slow").map(|_| "slow".to_owned()));
    facts.extend(root.get("error.type").map(|error| format!("failed: {error}")));
    facts
}

/// Nanoseconds as milliseconds with two decimals.
pub fn ms(ns: u64) -> String {
    format!("{:.2}", ns as f64 / 1e6)
}

fn size(bytes: f64) -> String {
    let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes / unit),
        None => format!("{bytes} bytes"),
    }
}
