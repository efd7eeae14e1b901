//! A request's trace as read from Jaeger.

use anyhow::Context;
use serde_json::Value;
use std::collections::BTreeMap;

/// Every span of a request that is prefilled on another worker: its name, its service and its parent.
const SPANS: [(&str, &str, &str); 14] = [
    ("claim", "baton-router", "generate"),
    ("decode.await_kv", "baton-decode-worker", "claim"),
    ("decode.generate", "baton-decode-worker", "claim"),
    ("decode.reserve", "baton-prefill-worker", "generate"),
    ("generate", "baton-router", ""),
    ("kv.commit", "baton-prefill-worker", "generate"),
    ("kv.exposed", "baton-prefill-worker", "generate"),
    ("kv.transfer", "baton-prefill-worker", "generate"),
    ("place", "baton-router", "generate"),
    ("prefill", "baton-router", "generate"),
    ("prefill.compute", "baton-prefill-worker", "prefill"),
    ("prefill.queue", "baton-prefill-worker", "prefill"),
    ("stream", "baton-router", "generate"),
    ("tokenize", "baton-router", "generate"),
];

/// Jaeger's answer to `/api/traces/ID`.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Name, service and parent's name of each span, in order.
    spans: Vec<(String, String, String)>,
    /// Tags by the name of their span.
    pub tags: BTreeMap<String, BTreeMap<String, String>>,
}

impl Trace {
    /// Reads the answer; an error if it contains no trace.
    pub fn read(answer: &Value) -> anyhow::Result<Self> {
        let trace = answer["data"].get(0).context("no trace")?;
        let spans = trace["spans"].as_array().context("no spans")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let names: BTreeMap<String, String> =
            spans.iter().map(|span| (text(&span["spanID"]), text(&span["operationName"]))).collect();
        let (mut all, mut tags) = (Vec::new(), BTreeMap::new());
        for span in spans {
            let service = text(&trace["processes"][text(&span["processID"])]["serviceName"]);
            let parent = span["references"].get(0).map(|parent| text(&parent["spanID"]));
            let parent = parent.and_then(|id| names.get(&id).cloned()).unwrap_or_default();
            let name = text(&span["operationName"]);
            let of = span["tags"].as_array().into_iter().flatten();
            let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            tags.insert(name.clone(), of.map(|tag| (text(&tag["key"]), value(&tag["value"]))).collect());
            all.push((name, service, parent));
        }
        all.sort();
        Ok(Self { spans: all, tags })
    }

    /// Whether it is the trace of one request that was prefilled on another worker: has each of its spans exactly once, with the right
    /// parent.
    pub fn is_whole(&self) -> bool {
        let expected = SPANS.map(|(name, service, parent)| (name.to_owned(), service.to_owned(), parent.to_owned()));
        self.spans == expected
    }
}
