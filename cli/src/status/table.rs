//! The status for people: the problems, one line for the router, one row per worker.

use baton_node::operators::{BlockCounts, ClusterStatus, RouterStatus, WorkerStatus};

/// Shown for an unknown value.
const UNKNOWN: &str = "-";
/// Longest name in a column, that of a host: pod names are shown in full.
const CELL_CHARS_MAX: usize = 253;
/// Columns, and whether they are numbers, which are aligned to the right.
const COLUMNS: [(&str, bool); 17] = [
    ("WORKER", false),
    ("ROLE", false),
    ("MODEL", false),
    ("POOL", false),
    ("STATE", false),
    ("FOR", true),
    ("RUN", true),
    ("WAIT", true),
    ("KV USED", true),
    ("FREE", true),
    ("REF", true),
    ("CACHED", true),
    ("QUAR", true),
    ("TOKENS/S", true),
    ("KV GB/S", true),
    ("HEARD", true),
    ("CLASS, PROTOCOL", false),
];

/// The whole status as text.
pub(super) fn of(status: &ClusterStatus) -> String {
    let mut lines = Vec::new();
    match status.problems.len() {
        0 => lines.push("Nothing is the matter.".into()),
        1 => lines.push("1 problem".into()),
        n => lines.push(format!("{n} problems")),
    }
    for problem in &status.problems {
        let about = if problem.worker.is_empty() { String::new() } else { format!("{}: ", problem.worker) };
        lines.push(printable(&format!("  {about}{}", problem.text)));
    }
    lines.push(String::new());
    if let Some(router) = &status.router {
        lines.push(router_line(router));
        lines.push(String::new());
    }
    lines.extend(rows(&status.workers));
    lines.join("\n")
}

/// The text without control characters, which a terminal would interpret: some of it comes from other processes.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn router_line(router: &RouterStatus) -> String {
    let requests = format!("Router: {} of {} requests run, {} wait", router.running, router.running_max, router.queued);
    let models = if router.models.is_empty() { "no model is ready".into() } else { router.models.join(", ") };
    let mut parts = vec![requests, models];
    if let (Some(p50), Some(p95)) = (router.ttft_p50_ms, router.ttft_p95_ms) {
        parts.push(format!(
            "TTFT median {p50:.0} ms, 95% within {p95:.0} ms ({} in the last minute)",
            router.ttft_count
        ));
    }
    parts.extend(router.etcd_reachable.map(|reachable| {
        let age = seconds(router.view_age_ms.unwrap_or(0));
        if reachable { "etcd answers".to_owned() } else { format!("etcd does not answer, view {age} old") }
    }));
    printable(&parts.join(" | "))
}

fn rows(workers: &[WorkerStatus]) -> Vec<String> {
    let head = COLUMNS.map(|(title, _)| title.to_owned());
    let cells: Vec<[String; 17]> = std::iter::once(head).chain(workers.iter().map(row)).collect();
    let widths: Vec<usize> =
        (0..COLUMNS.len()).map(|i| cells.iter().map(|row| row[i].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &[String; 17]| {
        let cell = |(i, text): (usize, &String)| {
            let width = widths[i];
            if COLUMNS[i].1 { format!("{text:>width$}") } else { format!("{text:<width$}") }
        };
        row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    cells.iter().map(line).collect()
}

fn row(w: &WorkerStatus) -> [String; 17] {
    let number = |n: Option<u64>| n.map_or_else(|| UNKNOWN.to_owned(), |n| n.to_string());
    let blocks = |of: fn(&BlockCounts) -> u64| number(w.blocks.as_ref().map(of));
    let used = w.blocks.filter(|b| b.total > 0).map(|b| 100 * (b.referenced + b.quarantined) / b.total);
    let with_max = |n: Option<u32>, max: u32| n.map_or_else(|| UNKNOWN.to_owned(), |n| format!("{n}/{max}"));
    let decimal = |n: Option<f64>, digits: usize| n.map_or_else(|| UNKNOWN.to_owned(), |n| format!("{n:.digits$}"));
    let cell = |text: &str| printable(&text.chars().take(CELL_CHARS_MAX).collect::<String>());
    [
        cell(&w.instance),
        w.role.into(),
        cell(&w.model),
        cell(&w.pool),
        w.state.into(),
        seconds(w.since_ms),
        with_max(w.running, w.running_max),
        with_max(w.waiting, w.waiting_max),
        used.map_or_else(|| UNKNOWN.to_owned(), |percent| format!("{percent}%")),
        blocks(|b| b.free),
        blocks(|b| b.referenced),
        blocks(|b| b.cached),
        blocks(|b| b.quarantined),
        decimal(w.tokens_per_s, 1),
        decimal(w.kv_bytes_per_s.map(|bytes| bytes / 1e9), 3),
        w.heard_ms.map_or_else(|| UNKNOWN.to_owned(), |ms| format!("{:.1} s", ms as f64 / 1e3)),
        cell(&format!("{}, {}", w.class, w.protocol)),
    ]
}

/// A time in its largest unit.
fn seconds(ms: u64) -> String {
    match ms / 1_000 {
        s if s < 120 => format!("{s} s"),
        s if s < 7_200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::operators::Problem;

    fn worker(name: &str) -> WorkerStatus {
        WorkerStatus {
            instance: name.into(),
            role: "decode",
            model: "m".into(),
            pool: "default".into(),
            state: "ready",
            since_ms: 130_000,
            heard_ms: Some(420),
            running: Some(3),
            running_max: 64,
            waiting: Some(0),
            waiting_max: 256,
            blocks: Some(BlockCounts { total: 100, free: 60, referenced: 30, cached: 8, quarantined: 2 }),
            tokens_per_s: Some(88.04),
            kv_bytes_per_s: Some(1.25e9),
            class: "avx2/bf16/bf16/1".into(),
            protocol: "1-2".into(),
            ..Default::default()
        }
    }

    #[test]
    fn problems_come_first_and_columns_stand_under_each_other() {
        let gone = WorkerStatus {
            instance: "decode-10".into(),
            role: "unknown",
            state: "gone",
            since_ms: 3_000,
            ..Default::default()
        };
        let problem =
            |worker: &str, text: &str| Problem { worker: worker.into(), kind: String::new(), text: text.into() };
        let status = ClusterStatus {
            healthy: false,
            problems: vec![problem("", "requests are refused"), problem("decode-10", "gone 3 s\u{1b}[2J ago")],
            router: Some(RouterStatus {
                running: 3,
                running_max: 1024,
                models: vec!["m".into()],
                ttft_count: 40,
                ttft_p50_ms: Some(98.2),
                ttft_p95_ms: Some(210.0),
                etcd_reachable: Some(false),
                view_age_ms: Some(12_000),
                ..Default::default()
            }),
            workers: vec![worker("decode-0"), gone],
        };
        let expected = "\
2 problems
  requests are refused
  decode-10: gone 3 s [2J ago

Router: 3 of 1024 requests run, 0 wait | m | TTFT median 98 ms, 95% within 210 ms (40 in the last minute) | etcd does not answer, view 12 s old

WORKER     ROLE     MODEL  POOL     STATE    FOR   RUN   WAIT  KV USED  FREE  REF  CACHED  QUAR  TOKENS/S  KV GB/S  HEARD  CLASS, PROTOCOL
decode-0   decode   m      default  ready  2 min  3/64  0/256      32%    60   30       8     2      88.0    1.250  0.4 s  avx2/bf16/bf16/1, 1-2
decode-10  unknown                  gone     3 s     -      -        -     -    -       -     -         -        -      -  ,";
        assert_eq!(of(&status), expected);
    }

    #[test]
    fn names_of_pods_are_shown_whole() {
        let name = "llm-baton-decode-meta-llama-3-1-8b-h100-5d8f9c7b64-x2x7z";
        let status = ClusterStatus { workers: vec![worker(name)], ..Default::default() };
        assert!(of(&status).contains(&format!("\n{name}  decode")), "{}", of(&status));
    }

    #[test]
    fn a_cluster_without_problems_says_so() {
        assert!(of(&ClusterStatus::default()).starts_with("Nothing is the matter.\n"));
    }
}
