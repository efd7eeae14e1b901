//! The waterfall as text.

use baton_node::operators::{Row, Waterfall, ms};
use std::fmt::Write as _;

/// Columns of the bars.
const BAR: usize = 40;

/// Draws all of it.
pub(super) fn draw(waterfall: &Waterfall) -> String {
    let mut out = plain(&waterfall.facts.join(", ")) + "\n\n";
    let label = |row: &Row| format!("{}{}", "  ".repeat(row.depth), plain(&row.name));
    let width = |of: &dyn Fn(&Row) -> String, head: &str| {
        waterfall.rows.iter().map(|row| of(row).chars().count()).max().unwrap_or(0).max(head.len())
    };
    let (names, processes) = (width(&label, "phase"), width(&|row| plain(&row.process), "process"));
    let starts = ms(waterfall.total_ns).len().max("start ms".len());
    let head = format!("{:names$}  {:processes$}  {:>starts$}  {:>starts$}", "phase", "process", "start ms", "ms");
    // Writing into a String cannot fail.
    let _ = writeln!(out, "{head}");
    for row in &waterfall.rows {
        let bar = bar(row.start_ns, row.length_ns, waterfall.total_ns);
        let (start, length) = (ms(row.start_ns), ms(row.length_ns));
        let line = format!(
            "{:names$}  {:processes$}  {start:>starts$}  {length:>starts$}  {bar}  {}",
            label(row),
            plain(&row.process),
            plain(&row.note)
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
    for (process, by) in &waterfall.moved {
        let by = *by as f64 / 1e6;
        let _ = writeln!(out, "\n{}: its clock differs; moved by {by:.2} ms", plain(process));
    }
    for silent in &waterfall.silent {
        let _ = writeln!(out, "\nmissing: worker {}", plain(silent));
    }
    out
}

/// At least one column for each span, however short.
fn bar(start: u64, length: u64, total: u64) -> String {
    let total = u128::from(total.max(1));
    let column = |ns: u64| (u128::from(ns) * BAR as u128 / total) as usize;
    let from = column(start).min(BAR - 1);
    let to = column(start.saturating_add(length)).clamp(from + 1, BAR);
    format!("{}{}{}", " ".repeat(from), "█".repeat(to - from), " ".repeat(BAR - to))
}

/// The text without control characters, so that text of other processes cannot control the terminal.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::testing::spans::{response, span};

    #[test]
    fn bars_show_when_and_how_long() {
        let drawn = |start, length| {
            let bar = bar(start, length, 400);
            assert_eq!(bar.chars().count(), BAR);
            let from = bar.chars().take_while(|c| *c == ' ').count();
            (from, bar.chars().filter(|c| *c == '█').count())
        };
        assert_eq!(drawn(0, 400), (0, 40));
        assert_eq!(drawn(100, 50), (10, 5));
        assert_eq!(drawn(0, 1), (0, 1), "short ones are seen");
        assert_eq!(drawn(400, 0), (39, 1), "and those at the very end");
    }

    #[test]
    fn a_request_is_drawn_with_its_facts() {
        let mut root = span(1, 0, "generate", 0, 100_000);
        for (key, value) in [("gen_ai.response.id", "req-1"), ("gen_ai.usage.input_tokens", "300")] {
            root.attributes.insert(key.into(), value.into());
        }
        let mut prefill = span(2, 1, "prefill", 10_000, 60_000);
        prefill.attributes.insert("baton.worker".into(), "prefill-0@abc".into());
        let mut transfer = span(3, 2, "kv.transfer", 20_000, 45_000);
        let facts = [("bytes", "153600"), ("gb_per_s", "1.234"), ("moving_ms", "0.1244"), ("exposed_ms", "0.4")];
        transfer.attributes.extend(facts.map(|(key, value)| (format!("baton.kv.{key}"), value.into())));
        let mut response = response(vec![("router", vec![root, prefill]), ("prefill-0@abc", vec![transfer])]);
        response.silent = vec!["decode-0@7 did not answer within 2 s\u{1b}[2J".into()];
        let text = draw(&Waterfall::of(response));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("request req-1, trace abab"), "{text}");
        let ends = [
            ("generate         router", "100.00  ████████████████████████████████████████"),
            ("  prefill        router", "50.00      ████████████████████                  -> prefill-0"),
            ("    kv.transfer  prefill-0", "153.6 kB, 1.23 GB/s over 0.12 ms, exposed 0.40 ms"),
        ];
        for (line, (start, end)) in lines[3..].iter().zip(ends) {
            assert!(line.starts_with(start) && line.ends_with(end), "{line:?} is not {start:?} .. {end:?}");
        }
        assert_eq!(lines.last(), Some(&"missing: worker decode-0@7 did not answer within 2 s?[2J"));
    }
}
