//! The description as a page that loads nothing.

use serde_json::Value;
use std::fmt::Write as _;

const HEAD: &str = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
<title>Baton: HTTP API</title><style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
code{font-family:ui-monospace,monospace}summary{cursor:pointer;padding:.3rem 0}table{border-collapse:collapse;margin:.5rem 0 1rem}\
td{border-top:1px solid #ccc;padding:.2rem .8rem .2rem 0;vertical-align:top}</style>";

/// Each operation, and the fields of its body.
pub(super) fn html(document: &Value) -> String {
    let mut page = HEAD.to_owned();
    let version = escaped(document["info"]["version"].as_str().unwrap_or_default());
    let _ = write!(page, "<h1>Baton {version}</h1><p>Machine-readable: <a href=\"openapi.json\">openapi.json</a></p>");
    for (path, operations) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in operations.as_object().into_iter().flatten() {
            let (method, path) = (method.to_uppercase(), escaped(path));
            let summary = escaped(operation["summary"].as_str().unwrap_or_default());
            let _ = write!(page, "<details><summary><code>{method} {path}</code> {summary}</summary><table>");
            let body = &operation["requestBody"]["content"]["application/json"]["schema"];
            let is_required = |name: &str| body["required"].as_array().is_some_and(|all| all.iter().any(|n| n == name));
            for (name, field) in body["properties"].as_object().into_iter().flatten() {
                let text = escaped(field["description"].as_str().unwrap_or_default());
                let (name, required) = (escaped(name), if is_required(name) { ", required" } else { "" });
                let _ = write!(page, "<tr><td><code>{name}</code>{required}<td>{text}");
            }
            page.push_str("</table></details>");
        }
    }
    page
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_document_says_is_on_the_page_and_nothing_is_loaded() {
        let page = html(&super::super::DOCUMENT);
        for part in ["POST /v1/messages", "cache_control", "GET /v1/models", "<code>max_tokens</code>, required"] {
            assert!(page.contains(part), "{part}");
        }
        for outside in ["http://", "https://", "<script", "src=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        let odd = html(&json!({"info": {"version": "<b>"}, "paths": {"/\"": {"get": {"summary": "&"}}}}));
        assert!(odd.contains("Baton &lt;b&gt;<") && odd.contains("GET /&quot;</code> &amp;<"), "{odd}");
    }
}
