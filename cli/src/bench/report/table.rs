//! The report for people in a terminal.

use super::{Distribution, Report};
use crate::stdout::grouped;
use serde_json::Value;

/// Width of the first column.
const NAME: usize = 12;

/// The whole report as text.
pub(super) fn of(report: &Report) -> String {
    let mut lines = vec![report.about.title.clone()];
    lines.extend(report.about.facts.iter().map(|(name, value)| format!("  {name}: {}", fact(value))));
    lines.push(String::new());
    lines.extend(summary(report).into_iter().map(|(name, text)| format!("{name:<NAME$}{text}")));
    lines.push(String::new());
    lines.push(row("MS", ["MEAN", "P50", "P90", "P95", "P99", "MAX"].map(str::to_owned)));
    lines.extend(distributions(report).map(|(name, times)| row(name, cells(times))));
    printable(&lines.join("\n"))
}

/// The values that are not distributions, line by line.
pub(super) fn summary(report: &Report) -> Vec<(&'static str, String)> {
    let (counts, tokens, cache) = (&report.counts, &report.tokens, &report.cache);
    let mut ends = vec![format!("{} ok", grouped(counts.ok))];
    ends.extend(counts.failed.iter().map(|(kind, count)| format!("{} failed ({kind})", grouped(*count))));
    let others = [(counts.cancelled, "cut off"), (counts.shed, "shed")];
    ends.extend(
        others.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{} {what}", grouped(*count))),
    );
    let mut lines = vec![
        ("requests", format!("{} in {:.1} s: {}", grouped(counts.requests), report.elapsed_s, ends.join(", "))),
        (
            "tokens",
            format!(
                "{} in ({:.1}/s), {} out ({:.1}/s)",
                grouped(tokens.prompt),
                tokens.prompt_per_s,
                grouped(tokens.output),
                tokens.output_per_s
            ),
        ),
    ];
    let against = match cache.of_infinite {
        Some(of) => {
            format!("an infinite cache {}, of which that is {}", percent(cache.infinite_hit_rate), percent(of))
        }
        None => "nothing is known to be shared".into(),
    };
    lines.push(("cache", format!("{} of prompt tokens hit; {against}", percent(cache.hit_rate))));
    if let Some(goodput) = &report.goodput {
        let slo = [("TTFT", goodput.slo.ttft_ms), ("ITL", goodput.slo.itl_ms)];
        let slo = slo.iter().filter_map(|(name, ms)| ms.map(|ms| format!("{name} up to {ms} ms")));
        let slo = slo.collect::<Vec<_>>().join(" and ");
        let (share, rate) = (percent(goodput.share), goodput.requests_per_s);
        lines.push(("goodput", format!("{share} of all requests, {rate:.2} a second, with {slo}")));
    }
    if !report.placement.is_empty() {
        let places = report.placement.iter().map(|(place, count)| format!("{} {place}", grouped(*count)));
        lines.push(("placement", places.collect::<Vec<_>>().join(", ")));
    }
    lines
}

/// The distributions and their names.
pub(super) fn distributions(report: &Report) -> impl Iterator<Item = (&'static str, &Distribution)> {
    [("TTFT", &report.ttft_ms), ("ITL", &report.itl_ms), ("end to end", &report.end_to_end_ms)].into_iter()
}

/// Mean, percentiles and maximum, in milliseconds; dashes if there is no value.
pub(super) fn cells(times: &Distribution) -> [String; 6] {
    [times.mean, times.p50, times.p90, times.p95, times.p99, times.max]
        .map(|ms| if times.count == 0 { "-".to_owned() } else { format!("{ms:.1}") })
}

fn row(name: &str, cells: [String; 6]) -> String {
    let cells = cells.iter().map(|cell| format!("{cell:>10}")).collect::<String>();
    format!("{name:<NAME$}{cells}")
}

/// A fact without the quotes of JSON.
pub(super) fn fact(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// The text without control characters, which a terminal would interpret: the placement comes from another process.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::some;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_terminal_shows_everything() {
        let mut report = some();
        report.about.facts.insert("dropped".into(), json!(1_200));
        report.placement.insert("evil\x1b[2J".into(), 1);
        let expected = "\
a load
  dropped: 1200

requests    5 in 3.8 s: 3 ok, 1 failed (overloaded), 1 shed
tokens      300 in (78.9/s), 12 out (3.2/s)
cache       32.0% of prompt tokens hit; an infinite cache 64.0%, of which that is 50.0%
goodput     20.0% of all requests, 0.26 a second, with TTFT up to 300 ms and ITL up to 15 ms
placement   1 evil [2J, 5 remote

MS                MEAN       P50       P90       P95       P99       MAX
TTFT             433.3     300.0     900.0     900.0     900.0     900.0
ITL              110.0      20.0     300.0     300.0     300.0     300.0
end to end       763.3     360.0    1800.0    1800.0    1800.0    1800.0";
        assert_eq!(report.table(), expected);
    }

    #[test]
    fn what_was_not_measured_is_a_dash() {
        let nothing = Report::of(super::super::About::default(), &[], super::super::Slo::default()).table();
        assert!(nothing.contains("0 in 0.0 s: 0 ok") && nothing.contains("nothing is known to be shared"), "{nothing}");
        assert!(nothing.lines().any(|l| l.starts_with("TTFT") && l.ends_with('-')), "{nothing}");
        assert!(!nothing.contains("goodput") && !nothing.contains("placement"), "{nothing}");
    }
}
