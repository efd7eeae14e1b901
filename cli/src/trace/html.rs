//! The waterfall as one page: no script, no external resources, and all text of other processes escaped.

use crate::page::{self, escape};
use baton_node::operators::{Row, Waterfall, ms};
use std::fmt::Write as _;

const STYLE: &str = "\
.grid{margin-top:1.25rem;border-top:1px solid var(--line)}\
.row,.head{display:grid;grid-template-columns:13rem 8rem 5.5rem 5.5rem 1fr;gap:0 .75rem;align-items:center;padding:.2rem 0}\
.head{color:var(--dim);font-size:12px}.head .track{height:1.2em}\
details{border-bottom:1px solid var(--line)}summary{list-style:none;cursor:pointer}summary::-webkit-details-marker{display:none}\
.name{white-space:nowrap;overflow:hidden;text-overflow:ellipsis;font-weight:600}.num{text-align:right;font-variant-numeric:tabular-nums}\
.track{position:relative;height:1.1em}.track i{position:absolute;top:0;bottom:0;min-width:2px;border-radius:2px;background:var(--router)}\
.prefill .track i{background:var(--prefill)}.decode .track i{background:var(--decode)}.failed .track i{background:var(--bad)}\
.head .track span{position:absolute;transform:translateX(-50%)}.head .track span:first-child{transform:none}.head .track span:last-child{transform:translateX(-100%)}\
.note{grid-column:5;color:var(--dim);font-size:12px}.failed .name,.failed .note{color:var(--bad)}\
table{margin:.25rem 0 .75rem 1rem;border-collapse:collapse;font-size:12px}td{padding:.05rem 1.25rem .05rem 0;vertical-align:top;overflow-wrap:anywhere}td:first-child{color:var(--dim);white-space:nowrap}";

pub(super) fn page(waterfall: &Waterfall) -> String {
    let facts = &waterfall.facts;
    let (title, rest) = facts.split_first().map_or(("trace", &[][..]), |(first, rest)| (first.as_str(), rest));
    let mut out = page::open(title, STYLE);
    // Writing into a String cannot fail.
    let _ = writeln!(out, "<h1>{}</h1>\n<p>{}</p>", escape(title), escape(&rest.join(" · ")));
    for (process, by) in &waterfall.moved {
        let by = *by as f64 / 1e6;
        let _ = writeln!(out, "<p>{}: its clock differs; moved by {by:.2} ms</p>", escape(process));
    }
    for silent in &waterfall.silent {
        let _ = writeln!(out, "<p class=\"bad\">missing: worker {}</p>", escape(silent));
    }
    let _ = write!(
        out,
        "<div class=\"grid\"><div class=\"head\"><span>phase</span><span>process</span><span class=\"num\">start ms</span>\
         <span class=\"num\">ms</span><span class=\"track\">"
    );
    for quarter in 0..=4 {
        let at = ms(waterfall.total_ns / 4 * quarter);
        let _ = write!(out, "<span style=\"left:{}%\">{at}</span>", quarter * 25);
    }
    out.push_str("</span></div>\n");
    waterfall.rows.iter().for_each(|row| draw(row, waterfall.total_ns, &mut out));
    out.push_str("</div>");
    page::close(out)
}

fn draw(row: &Row, total_ns: u64, out: &mut String) {
    let percent = |ns: u64| ns as f64 / total_ns.max(1) as f64 * 100.0;
    let (start, length, note) = (ms(row.start_ns), ms(row.length_ns), &row.note);
    let _ = write!(
        out,
        "<details class=\"{kind}{failed}\"><summary class=\"row\">\
         <span class=\"name\" style=\"padding-left:{indent}rem\">{name}</span><span>{process}</span>\
         <span class=\"num\">{start}</span><span class=\"num\">{length}</span>\
         <span class=\"track\" title=\"{start} ms + {length} ms\"><i style=\"left:{left:.3}%;width:{width:.3}%\"></i></span>",
        kind = kind(row),
        failed = if row.failed { " failed" } else { "" },
        indent = row.depth,
        name = escape(&row.name),
        process = escape(&row.process),
        left = percent(row.start_ns).min(99.9),
        width = percent(row.length_ns),
    );
    if !note.is_empty() {
        let _ = write!(out, "<span class=\"note\">{}</span>", escape(note));
    }
    out.push_str("</summary><table>");
    for (key, value) in &row.attributes {
        let _ = write!(out, "<tr><td>{}</td><td>{}</td></tr>", escape(key), escape(value));
    }
    out.push_str("</table></details>\n");
}

/// The colour class: the phase, on any process.
fn kind(row: &Row) -> &'static str {
    match row.name.split('.').next() {
        Some("prefill" | "kv") => "prefill",
        Some("decode") => "decode",
        _ => "router",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::testing::spans::{response, span};

    const EVIL: &str = "<script>alert('1')</script>\"&";

    #[test]
    fn text_of_others_is_text() {
        let mut root = span(1, 0, EVIL, 0, 100);
        for key in
            ["gen_ai.response.id", "gen_ai.response.model", "error.type", "baton.worker", "baton.kv.transport", EVIL]
        {
            root.attributes.insert(key.into(), EVIL.into());
        }
        root.failed = true;
        let mut response = response(vec![(EVIL, vec![root])]);
        response.silent = vec![EVIL.into()];
        let page = page(&Waterfall::of(response));
        assert!(!page.contains("<script") && !page.contains("alert('1')"), "{page}");
        // Title, heading, model, error, missing, name, process, three notes; six values and one key.
        let escaped = escape(EVIL);
        assert_eq!(page.matches(&escaped).count(), 17, "{page}");
        for forbidden in ["http://", "https://", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(forbidden), "{forbidden} in a page that stands alone");
        }
    }

    #[test]
    fn bars_stand_at_their_share_of_the_time() {
        let spans = vec![span(1, 0, "generate", 0, 400), span(2, 1, "kv.transfer", 100, 300)];
        let page = page(&Waterfall::of(response(vec![("router", spans)])));
        assert!(page.contains("<i style=\"left:0.000%;width:100.000%\">"), "{page}");
        assert!(page.contains("<i style=\"left:25.000%;width:50.000%\">"), "{page}");
        assert!(page.contains("<details class=\"prefill\">") && page.contains(">0.10</span>"), "{page}");
    }
}
