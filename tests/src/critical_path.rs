//! The critical path of a trace as Jaeger draws it: from the end of the root backwards, always along the child that finished last.
//!
//! Follows `utils/criticalPath` of Jaeger's user interface. Times are microseconds, and children are cut to the time of their parent. A
//! child precedes another only if it ends before that one begins.

use anyhow::Context;
use baton_node::testing::CollectedSpan;
use std::collections::HashMap;
use std::ops::Range;

/// A stretch of time that one span accounts for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Name of the span.
    pub span: String,
    /// Microseconds since 1970.
    pub time_us: Range<u64>,
}

struct Node<'a> {
    name: &'a str,
    parent: Option<usize>,
    time: Range<u64>,
    /// Children that finished last are first.
    children: Vec<usize>,
}

/// The path through the spans of one trace, the last section first. An error if the trace does not have exactly one root.
pub fn critical_path(spans: &[CollectedSpan]) -> anyhow::Result<Vec<Section>> {
    let index: HashMap<&str, usize> = spans.iter().enumerate().map(|(at, span)| (&*span.span_id, at)).collect();
    let node = |span: &CollectedSpan| {
        let parent = span.parent_id.as_deref().and_then(|id| index.get(id).copied());
        let time = span.time_ns.start / 1_000..span.time_ns.end / 1_000;
        (span.name.clone(), parent, time)
    };
    let read: Vec<_> = spans.iter().map(node).collect();
    let mut nodes: Vec<Node<'_>> = read
        .iter()
        .map(|(name, parent, time)| Node { name, parent: *parent, time: time.clone(), children: Vec::new() })
        .collect();
    let mut roots = (0..nodes.len()).filter(|at| nodes[*at].parent.is_none());
    let (root, None) = (roots.next().context("no root")?, roots.next()) else { anyhow::bail!("several roots") };
    // Parents before children, so that each is cut to the remaining time of its parent.
    let mut order = vec![root];
    let mut next = 0;
    while let Some(&at) = order.get(next) {
        next += 1;
        let within = nodes[at].time.clone();
        let below: Vec<usize> = (0..nodes.len()).filter(|child| nodes[*child].parent == Some(at)).collect();
        for child in below {
            let time = &mut nodes[child].time;
            if time.start >= within.end || time.end <= within.start {
                continue;
            }
            *time = time.start.max(within.start)..time.end.min(within.end);
            nodes[at].children.push(child);
            order.push(child);
        }
        let mut children = std::mem::take(&mut nodes[at].children);
        children.sort_by_key(|child| std::cmp::Reverse(nodes[*child].time.end));
        nodes[at].children = children;
    }
    let (mut path, mut at, mut before) = (Vec::new(), root, None);
    loop {
        let node = &nodes[at];
        let end = before.unwrap_or(node.time.end);
        let precedes = |child: &&usize| before.is_none_or(|before| nodes[**child].time.end < before);
        let last = node.children.iter().find(precedes);
        let start = last.map_or(node.time.start, |child| nodes[*child].time.end);
        if start < end {
            path.push(Section { span: node.name.to_owned(), time_us: start..end });
        }
        match (last, node.parent) {
            (Some(child), _) => (at, before) = (*child, None),
            (None, Some(parent)) => (before, at) = (Some(node.time.start), parent),
            (None, None) => return Ok(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(id: u8, parent: u8, name: &str, us: Range<u64>) -> CollectedSpan {
        CollectedSpan {
            service: String::new(),
            resource: Default::default(),
            name: name.into(),
            trace_id: "t".into(),
            span_id: id.to_string(),
            parent_id: (parent > 0).then(|| parent.to_string()),
            attributes: Default::default(),
            time_ns: us.start * 1_000..us.end * 1_000,
        }
    }

    #[test]
    fn the_path_runs_along_who_finished_last() {
        let spans = [
            span(1, 0, "generate", 0..100),
            span(2, 1, "claim", 5..98),
            span(3, 2, "wait", 6..62),
            span(4, 1, "prefill", 8..58),
            span(5, 4, "queue", 9..19),
            span(6, 4, "compute", 20..55),
            span(7, 4, "late", 50..70),
            span(8, 1, "stream", 60..100),
        ];
        let told = |spans: &[CollectedSpan]| {
            let line = |s: Section| format!("{} {}..{}", s.span, s.time_us.start, s.time_us.end);
            critical_path(spans).unwrap().into_iter().map(line).collect::<Vec<_>>()
        };
        let with_late = ["stream 60..100", "generate 58..60", "late 50..58", "prefill 19..50", "queue 9..19"];
        assert_eq!(told(&spans)[..5], with_late, "a child that outlasts its parent is cut");
        let without: Vec<_> = spans.iter().filter(|s| s.name != "late").cloned().collect();
        let expected = ["stream 60..100", "generate 58..60", "prefill 55..58", "compute 20..55", "prefill 19..20"];
        assert_eq!(told(&without)[..5], expected);
        let total: u64 = critical_path(&without).unwrap().iter().map(|s| s.time_us.end - s.time_us.start).sum();
        assert_eq!(total, 100, "it covers the whole request");
    }
}
