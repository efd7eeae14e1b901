//! Self-contained pages: no script, no external resources, in the reader's light or dark scheme, and with all text of other processes
//! escaped.

use baton_node::operators::PALETTE;

/// The styles that every page has.
const BASE: &str = "\
body{margin:2rem auto;max-width:78rem;padding:0 1rem;font:14px/1.45 system-ui,sans-serif;color:var(--text);background:var(--back)}\
h1{font-size:1.25rem;margin:0 0 .25rem}p{margin:.15rem 0;color:var(--dim)}p.bad{color:var(--bad)}";

/// The beginning of a page, up to its body.
pub(crate) fn open(title: &str, style: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Baton: {title}</title><style>{PALETTE}{BASE}{style}</style></head>\n<body>",
        title = escape(title),
    )
}

pub(crate) fn close(mut page: String) -> String {
    page.push_str("</body></html>\n");
    page
}

/// A text escaped for use in an element or an attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}
