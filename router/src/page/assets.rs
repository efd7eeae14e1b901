//! The files of the page, embedded in this program.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use baton_node::operators::PALETTE;
use sha2::{Digest as _, Sha256};

/// Nothing from elsewhere, no inline script or style, and no text that becomes markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

/// Path, media type and content of each file.
const FILES: &[(&str, &str, &str)] = &[
    ("/", HTML, include_str!("ui/index.html")),
    ("/ui/palette.css", CSS, PALETTE),
    ("/ui/page.css", CSS, include_str!("ui/page.css")),
    ("/ui/icon.svg", "image/svg+xml", include_str!("ui/icon.svg")),
    ("/ui/main.js", JS, include_str!("ui/main.js")),
    ("/ui/api.js", JS, include_str!("ui/api.js")),
    ("/ui/dom.js", JS, include_str!("ui/dom.js")),
    ("/ui/format.js", JS, include_str!("ui/format.js")),
    ("/ui/chat.js", JS, include_str!("ui/chat.js")),
    ("/ui/cluster.js", JS, include_str!("ui/cluster.js")),
    ("/ui/handoffs.js", JS, include_str!("ui/handoffs.js")),
    ("/ui/requests.js", JS, include_str!("ui/requests.js")),
    ("/ui/waterfall.js", JS, include_str!("ui/waterfall.js")),
];

pub(super) fn routes() -> Router {
    FILES.iter().fold(Router::new(), |routes, (path, kind, text)| {
        let tag = format!("\"{}\"", hex::encode(&Sha256::digest(text)[..16]));
        routes.route(path, get(async move |headers: HeaderMap| file(kind, text, &tag, &headers)))
    })
}

/// The file, or 304 where the browser has it.
fn file(kind: &'static str, text: &'static str, tag: &str, headers: &HeaderMap) -> Response {
    let is_known = headers.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = Response::new(if is_known { Body::empty() } else { Body::from(text) });
    if is_known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let set = [
        (header::CONTENT_TYPE, kind),
        // A router of another version has other files.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    response.headers_mut().extend(set.map(|(name, value)| (name, HeaderValue::from_static(value))));
    if let Ok(tag) = HeaderValue::from_str(tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}
