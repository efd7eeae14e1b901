//! The report as one page, with plots.

use super::plots::{Line, Plot};
use super::series::Window;
use super::{Report, table};
use crate::page::{self, escape};
use std::fmt::Write as _;

/// Shorter times are shown as this, because a logarithmic axis cannot show 0. Gaps this short are not visible to a reader of the answer.
const TOGETHER_MS: f64 = 0.1;

const STYLE: &str = "\
table{margin:1.25rem 0;border-collapse:collapse}td,th{padding:.15rem 1.5rem .15rem 0;text-align:left;font-weight:400;vertical-align:top}\
th{color:var(--dim)}.num td,.num th{text-align:right;font-variant-numeric:tabular-nums}.num tr>:first-child{text-align:left}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1.5rem;margin-top:1.5rem}\
figure{margin:0}figcaption{font-weight:600}svg{display:block;width:100%;height:auto;color:var(--text)}\
svg text{font-size:11px;fill:var(--dim)}svg line,svg polyline{stroke:var(--line)}\
[stroke=\"#0000FF\"]{stroke:var(--router)!important}[stroke=\"#FF0000\"]{stroke:var(--prefill)!important}\
[fill=\"#0000FF\"]{fill:var(--router)}[fill=\"#FF0000\"]{fill:var(--prefill)}\
.legend span{margin-right:1.25rem}\
.legend span:before{content:\"\";display:inline-block;width:1.25em;height:2px;margin-right:.4em;vertical-align:middle}\
.legend .a:before{background:var(--router)}.legend .b:before{background:var(--prefill)}";

pub(super) fn page(report: &Report) -> String {
    let mut out = page::open(&report.about.title, STYLE);
    // Writing into a String cannot fail.
    let _ = writeln!(out, "<h1>{}</h1>", escape(&report.about.title));
    for (name, value) in &report.about.facts {
        let _ = writeln!(out, "<p>{}: {}</p>", escape(name), escape(&table::fact(value)));
    }
    out.push_str("<table>");
    for (name, text) in table::summary(report) {
        let _ = write!(out, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(&text));
    }
    out.push_str("</table>\n<table class=\"num\"><tr>");
    for head in ["ms", "mean", "p50", "p90", "p95", "p99", "max"] {
        let _ = write!(out, "<th>{head}</th>");
    }
    out.push_str("</tr>");
    for (name, times) in table::distributions(report) {
        let _ = write!(out, "<tr><th>{name}</th>");
        for cell in table::cells(times) {
            let _ = write!(out, "<td>{cell}</td>");
        }
        out.push_str("</tr>");
    }
    out.push_str("</table>\n<div class=\"plots\">\n");
    for plot in plots(report) {
        out.push_str(&plot.figure());
        out.push('\n');
    }
    out.push_str("</div>");
    page::close(out)
}

fn plots(report: &Report) -> [Plot; 5] {
    let windows = &report.series.windows;
    let cumulative = |points: &[f64]| {
        let point = |(index, &ms): (usize, &f64)| (ms.max(TOGETHER_MS), Some((index + 1) as f64 / points.len() as f64));
        points.iter().enumerate().map(point).collect()
    };
    let over_time = |of: fn(&Window) -> Option<f64>| {
        windows.iter().map(|window| ((window.from_s + window.to_s) / 2.0, of(window))).collect::<Vec<_>>()
    };
    let line = |name, points| Line { name, points };
    let shares = |title, points: &[f64]| Plot {
        title,
        x: "ms at most",
        y: "share",
        logarithmic: true,
        y_max: Some(1.0),
        lines: vec![line("share", cumulative(points))],
    };
    let times = |title, y, lines| Plot { title, x: "s", y, logarithmic: false, y_max: None, lines };
    [
        shares("Time to first token", &report.series.ttft_ms),
        shares("Time between tokens", &report.series.itl_ms),
        times(
            "Time to first token, by arrival",
            "ms",
            vec![
                line("p50", over_time(|window| window.ttft_p50_ms)),
                line("p95", over_time(|window| window.ttft_p95_ms)),
            ],
        ),
        times(
            "Requests under way, at most",
            "",
            vec![line("requests", over_time(|window| Some(window.in_flight_max as f64)))],
        ),
        Plot {
            y_max: Some(1.0),
            ..times(
                "Hit share of prompt tokens, by arrival",
                "share",
                vec![
                    line("here", over_time(|window| window.hit_rate)),
                    line("infinite cache", over_time(|window| window.infinite_hit_rate)),
                ],
            )
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{outcome, some};
    use super::super::{About, Outcome, Report, Slo};

    const EVIL: &str = "<script>alert('1')</script>\"&";

    #[test]
    fn a_page_has_its_plots_and_needs_nothing_else() {
        let page = some().html();
        assert_eq!((page.matches("<svg ").count(), page.matches("<span class=\"").count()), (5, 7), "{page}");
        for told in ["a load", "1 failed (overloaded)", "433.3", "infinite cache", "Time between tokens"] {
            assert!(page.contains(told), "{told}: {page}");
        }
        for forbidden in ["<script", "http://", "https://", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(forbidden), "{forbidden} in a page that stands alone");
        }
        assert!(page.contains("prefers-color-scheme:dark") && page.ends_with("</html>\n"));
    }

    #[test]
    fn text_of_others_is_text() {
        let mut about = About { title: EVIL.into(), ..About::default() };
        about.facts.insert(EVIL.into(), EVIL.into());
        let told = Outcome { placement: Some(EVIL.into()), ..outcome(0, 1, 1) };
        let page = Report::of(about, &[told], Slo::default()).html();
        assert!(!page.contains("<script") && !page.contains("alert('1')"), "{page}");
    }

    #[test]
    fn a_load_of_nothing_is_a_page_too() {
        let page = Report::of(About::default(), &[], Slo::default()).html();
        assert_eq!(page.matches("nothing was measured").count(), 5, "{page}");
    }
}
