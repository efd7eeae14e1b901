//! `/openapi.json`: the description of the HTTP port. Requests are described from the tables that their parsers use, so
//! no field is missing or invented; `/docs` is the same as a page.

mod answers;
mod fields;
mod page;

use crate::anthropic::MESSAGES;
use crate::openai::chat::CHAT;
use crate::openai::common::{COMMON, SHARED};
use crate::openai::completions::COMPLETIONS;
use crate::openai::responses::RESPONSES;
use crate::openai::tokenize::{DETOKENIZE, TOKENIZE};
use crate::wire::fields::{Policy, Row};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{Html, IntoResponse};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

static DOCUMENT: LazyLock<Value> = LazyLock::new(document);
static TEXT: LazyLock<String> = LazyLock::new(|| DOCUMENT.to_string());
static PAGE: LazyLock<String> = LazyLock::new(|| page::html(&DOCUMENT));

/// All answers share the text, also those that nobody reads.
pub(super) async fn json() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], TEXT.as_str())
}

pub(super) async fn docs() -> impl IntoResponse {
    const POLICY: HeaderName = header::CONTENT_SECURITY_POLICY;
    // The page needs its own style and nothing else.
    let policy = HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'");
    ([(POLICY, policy)], Html(PAGE.as_str()))
}

/// An endpoint that takes a body.
struct Endpoint {
    path: &'static str,
    summary: &'static str,
    tables: &'static [&'static [Row]],
    required: &'static [&'static str],
    /// Name of the schema of its answer.
    answer: &'static str,
    /// Whether the answer may be a stream.
    streams: bool,
    /// Descriptions of fields that mean something else elsewhere.
    own: &'static [fields::Field],
}

const ENDPOINTS: &[Endpoint] = &[
    Endpoint {
        path: "/v1/chat/completions",
        summary: "Chat; the model's own template makes the prompt",
        tables: &[CHAT, COMMON, SHARED],
        required: &["messages"],
        answer: "ChatCompletion",
        streams: true,
        own: fields::CHAT,
    },
    Endpoint {
        path: "/v1/completions",
        summary: "Continuation of a plain prompt",
        tables: &[COMPLETIONS, COMMON, SHARED],
        required: &["prompt"],
        answer: "Completion",
        streams: true,
        own: fields::COMPLETIONS,
    },
    Endpoint {
        path: "/v1/responses",
        summary: "Chat in OpenAI's Responses API, without a store",
        tables: &[RESPONSES, SHARED],
        required: &["input"],
        answer: "Response",
        streams: true,
        own: fields::RESPONSES,
    },
    Endpoint {
        path: "/v1/messages",
        summary: "Chat in Anthropic's API",
        tables: &[MESSAGES, SHARED],
        required: &["messages", "max_tokens"],
        answer: "Message",
        streams: true,
        own: fields::MESSAGES,
    },
    Endpoint {
        path: "/v1/messages/count_tokens",
        summary: "Tokens of the prompt that a request of /v1/messages would have",
        tables: &[MESSAGES, SHARED],
        required: &["messages"],
        answer: "TokenCount",
        streams: false,
        own: fields::MESSAGES,
    },
    Endpoint {
        path: "/tokenize",
        summary: "Tokens of a prompt or of messages; further fields as those of the request that it stands for",
        tables: &[TOKENIZE, CHAT, COMPLETIONS, COMMON, SHARED],
        required: &[],
        answer: "Tokens",
        streams: false,
        own: fields::TOKENIZE,
    },
    Endpoint {
        path: "/detokenize",
        summary: "The text of tokens",
        tables: &[DETOKENIZE],
        required: &["tokens"],
        answer: "Text",
        streams: false,
        own: &[],
    },
];

/// Endpoints without a body: path, summary, name of the schema of the answer, and whether they need a key.
const READS: &[(&str, &str, Option<&str>, bool)] = &[
    ("/v1/models", "Models that would be served now", Some("Models"), true),
    ("/v1/models/{model}", "One of them", Some("Model"), true),
    ("/healthz", "200 while the process works", None, false),
    ("/health", "The same", None, false),
    ("/startupz", "200 once the start is complete", None, false),
    ("/readyz", "200 while a request of some model would be served, else 503 and the reason", None, false),
    ("/ping", "200 while the process works", None, false),
    ("/version", "The router's version", Some("Version"), false),
    ("/metrics", "Metrics in Prometheus' text format; not here if they have a port of their own", None, false),
    ("/openapi.json", "This description", None, false),
    ("/docs", "This description as a page", None, false),
    ("/", "A page with a chat, the cluster, and recent requests", None, false),
    ("/cluster", "For operators: the status of the cluster", None, true),
    ("/cluster/events", "For operators: the same as server-sent events, and handoffs of KV as they end", None, true),
    ("/cluster/requests", "For operators: the newest requests that have ended; `limit` says how many", None, true),
    ("/cluster/requests/{id}", "For operators: the spans of one of them", None, true),
];

fn document() -> Value {
    let mut paths = Map::new();
    for endpoint in ENDPOINTS {
        paths.insert(endpoint.path.into(), json!({"post": endpoint.operation()}));
    }
    for (path, summary, answer, is_keyed) in READS {
        let mut read = json!({"summary": summary, "responses": {"200": {"description": "the answer"}}});
        if let Some(answer) = answer {
            read["responses"]["200"]["content"] = content(reference(answer));
        }
        if *is_keyed {
            read["security"] = security();
        }
        if let Some((_, name)) = path.split_once('{') {
            let name = name.trim_end_matches('}');
            read["responses"]["404"] = json!({"description": "there is none of that name"});
            read["parameters"] = json!([{"name": name, "in": "path", "required": true, "schema": {"type": "string"}}]);
        }
        paths.insert((*path).into(), json!({"get": read}));
    }
    paths["/ping"]["post"] = paths["/ping"]["get"].clone();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "HTTP API of a router. Keys are needed only where the operator has set some.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": answers::schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

/// With a key in either header, or without one.
fn security() -> Value {
    json!([{"bearer": []}, {"key": []}, {}])
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn content(schema: Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

impl Endpoint {
    fn operation(&self) -> Value {
        let error = if self.path.starts_with("/v1/messages") { "AnthropicError" } else { "Error" };
        let mut answer = content(reference(self.answer));
        if self.streams {
            // Some clients check the whole body with it, others each event.
            answer["text/event-stream"] = json!({"schema": {"description": "Server-sent events"}});
        }
        json!({
            "summary": self.summary,
            "security": security(),
            "parameters": fields::headers(),
            "requestBody": {"required": true, "content": content(self.request())},
            "responses": {
                "200": {"description": "the answer", "content": answer},
                "default": {"description": "an error", "content": content(reference(error))},
            },
        })
    }

    /// The schema of its body.
    fn request(&self) -> Value {
        let mut properties = Map::new();
        for (name, policy) in self.tables.iter().copied().flatten() {
            properties.entry(*name).or_insert_with(|| self.field(name, policy));
        }
        let required = self.required;
        let mut schema = json!({"type": "object", "properties": properties, "required": required});
        if schema["properties"].get("stream_options").is_some() {
            let streams = json!({"properties": {"stream": {"const": true}}, "required": ["stream"]});
            schema["dependentSchemas"] = json!({"stream_options": streams});
        }
        schema
    }

    fn field(&self, name: &str, policy: &Policy) -> Value {
        match policy {
            Policy::Supported => fields::schema(name, self.own).unwrap_or_else(|| json!({})),
            Policy::Ignored => json!({"description": "Accepted, without effect"}),
            Policy::Only { values, .. } => json!({"description": format!("Not supported: only {values} is accepted")}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_field_of_each_parser_is_described_and_no_other() {
        let mut described = BTreeSet::new();
        for endpoint in ENDPOINTS {
            let request = endpoint.request();
            let rows: BTreeSet<&str> = endpoint.tables.iter().copied().flatten().map(|(name, _)| *name).collect();
            let properties = request["properties"].as_object().unwrap();
            assert_eq!(properties.keys().map(String::as_str).collect::<BTreeSet<_>>(), rows, "{}", endpoint.path);
            for (name, policy) in endpoint.tables.iter().copied().flatten() {
                let text = properties[*name]["description"].as_str();
                assert!(text.is_some_and(|text| text.len() > 10), "{}: {name} has no description", endpoint.path);
                if matches!(policy, Policy::Supported) {
                    described.insert(*name);
                }
            }
            assert!(endpoint.required.iter().all(|name| rows.contains(name)), "{}", endpoint.path);
            for (name, _) in endpoint.own {
                assert!(rows.contains(name), "{} has no {name}", endpoint.path);
            }
        }
        for (name, _) in fields::ALL {
            assert!(described.contains(name), "no parser has {name}");
        }
    }

    #[test]
    fn references_lead_somewhere() {
        let document = document();
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let mut used = BTreeSet::new();
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
            used.insert(name);
        }
        assert_eq!(used.len(), schemas.len(), "schemas that nothing uses");
    }

    #[test]
    fn the_manual_and_the_document_have_the_same_paths() {
        let page = include_str!("../../../../docs/api.md");
        let table = page.split("| Method and path | Meaning |").nth(1).unwrap().split("\n\n").next().unwrap();
        let mut told = BTreeSet::new();
        for cell in table.lines().filter_map(|line| line.split('|').nth(1)) {
            for spelled in cell.split('`').skip(1).step_by(2) {
                let path = spelled.rsplit(' ').next().unwrap();
                told.insert(path.replace("{name}", "{model}"));
            }
        }
        let document = document();
        let paths: BTreeSet<String> = document["paths"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(told, paths);
    }
}
