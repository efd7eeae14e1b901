//! Orders the spans of one request for display: each under its parent, by start time, in time since the first span. Pure.

use super::notes;
use super::trace::{RequestTrace, Span};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};

/// A request's spans in display order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Waterfall {
    /// Facts of the whole request, one per entry.
    pub facts: Vec<String>,
    /// Id of the trace as 32 hexadecimal digits.
    pub trace_id: String,
    /// From the first start to the last end, nanoseconds.
    pub total_ns: u64,
    pub rows: Vec<Row>,
    /// Processes with a different clock, and by how many nanoseconds their spans were shifted.
    pub moved: Vec<(String, i64)>,
    /// Workers that sent no spans, with the reason.
    pub silent: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub depth: usize,
    /// Name of the span.
    pub name: String,
    /// `router`, or the name of a worker.
    pub process: String,
    /// Start, nanoseconds since the first one.
    pub start_ns: u64,
    /// Length of the span, nanoseconds.
    pub length_ns: u64,
    pub failed: bool,
    /// What to say of the span besides its time.
    pub note: String,
    /// Further attributes of the span.
    pub attributes: BTreeMap<String, String>,
}

impl Row {
    pub fn get(&self, key: &str) -> Option<&str> {
        self.attributes.get(key).map(String::as_str)
    }

    /// The value of a numeric attribute.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.get(key)?.parse().ok()
    }
}

/// A span with its process and its start and end, after the clocks are aligned.
struct Node {
    span: Span,
    process: usize,
    start: i128,
    end: i128,
}

impl Waterfall {
    /// Orders the spans that a router collected.
    pub fn of(trace: RequestTrace) -> Self {
        // An incarnation means little to a reader; it is shown only if two starts of a worker took part.
        let short: Vec<&str> = trace.processes.iter().map(|p| name(&p.process)).collect();
        let is_alone = |name: &str| short.iter().filter(|other| **other == name).count() == 1;
        let names = trace.processes.iter().zip(&short);
        let names: Vec<String> =
            names.map(|(p, short)| if is_alone(short) { (*short).into() } else { p.process.clone() }).collect();
        let mut nodes = Vec::new();
        for (process, spans) in trace.processes.into_iter().enumerate() {
            nodes.extend(spans.spans.into_iter().map(|span| {
                let (start, end) = (i128::from(span.start_ns), i128::from(span.end_ns.max(span.start_ns)));
                Node { span, process, start, end }
            }));
        }
        nodes.sort_by_key(|node| (node.start, -node.end));
        let moved = align(&mut nodes, names.len());
        nodes.sort_by_key(|node| (node.start, -node.end));
        let first = nodes.iter().map(|node| node.start).min().unwrap_or(0);
        let last = nodes.iter().map(|node| node.end).max().unwrap_or(first);
        let rows: Vec<Row> =
            in_order(&nodes).into_iter().map(|(depth, at)| row(&nodes[at], depth, first, &names)).collect();
        Self {
            facts: notes::of_request(&trace.trace_id, &rows),
            trace_id: trace.trace_id,
            total_ns: (last - first) as u64,
            rows,
            moved: moved.into_iter().map(|(process, by)| (names[process].clone(), by as i64)).collect(),
            silent: trace.silent,
        }
    }
}

fn name(process: &str) -> &str {
    process.rsplit_once('@').map_or(process, |(name, _)| name)
}

fn row(node: &Node, depth: usize, first: i128, names: &[String]) -> Row {
    let span = &node.span;
    let mut row = Row {
        depth,
        name: span.name.clone(),
        process: names[node.process].clone(),
        start_ns: (node.start - first) as u64,
        length_ns: (node.end - node.start) as u64,
        failed: span.failed,
        note: String::new(),
        attributes: span.attributes.clone(),
    };
    row.note = notes::of(&row);
    row
}

/// Clocks of hosts differ. A span that begins before the call that caused it, or ends after that call, shows by how much. The spans of
/// its process are shifted so that this span is in the middle of the call, as if both network directions took equally long.
fn align(nodes: &mut [Node], processes: usize) -> Vec<(usize, i128)> {
    let by_id: HashMap<_, usize> = nodes.iter().enumerate().map(|(at, n)| (n.span.id.clone(), at)).collect();
    let wrong_by = |node: &Node| {
        let parent = &nodes[*by_id.get(&node.span.parent_id)?];
        let is_possible = parent.process == node.process || (parent.start..=parent.end).contains(&node.start);
        let spare = (parent.end - parent.start) - (node.end - node.start);
        (!is_possible).then(|| parent.start + (spare / 2).max(0) - node.start)
    };
    // The first process is the router, whose clock is the reference.
    let moved: Vec<(usize, i128)> = (1..processes)
        .filter_map(|process| {
            let by = nodes.iter().filter(|node| node.process == process).find_map(wrong_by)?;
            Some((process, by))
        })
        .collect();
    for (process, by) in &moved {
        for node in nodes.iter_mut().filter(|node| node.process == *process) {
            node.start += by;
            node.end += by;
        }
    }
    moved
}

/// Depth and index of each node, parents before children. A node whose parent is missing is at the top.
fn in_order(nodes: &[Node]) -> Vec<(usize, usize)> {
    let ids: HashSet<_> = nodes.iter().map(|node| &node.span.id).collect();
    let mut below: HashMap<_, Vec<usize>> = HashMap::new();
    let mut open = Vec::new();
    for (at, node) in nodes.iter().enumerate().rev() {
        match ids.contains(&node.span.parent_id) && node.span.parent_id != node.span.id {
            true => below.entry(&node.span.parent_id).or_default().push(at),
            false => open.push((0, at)),
        }
    }
    let mut order = Vec::with_capacity(nodes.len());
    // The lists are reversed: the first child is pushed last onto the stack, so it is popped first.
    while let Some((depth, at)) = open.pop() {
        order.push((depth, at));
        let children = below.remove(&nodes[at].span.id).unwrap_or_default();
        open.extend(children.into_iter().map(|child| (depth + 1, child)));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::spans::{response, span};

    fn lines(waterfall: &Waterfall) -> Vec<String> {
        let line = |row: &Row| {
            let indent = "  ".repeat(row.depth);
            let (from, to) = (row.start_ns / 1_000, (row.start_ns + row.length_ns) / 1_000);
            format!("{indent}{} {} {from}..{to}", row.name, row.process)
        };
        waterfall.rows.iter().map(line).collect()
    }

    #[test]
    fn spans_stand_under_their_parents_by_start() {
        let router = vec![
            span(3, 1, "claim", 20, 95),
            span(2, 1, "place", 10, 11),
            span(4, 1, "prefill", 20, 60),
            span(1, 99, "generate", 5, 105),
        ];
        let decode = vec![span(31, 3, "decode.generate", 61, 90), span(30, 3, "decode.await_kv", 22, 61)];
        let waterfall = Waterfall::of(response(vec![("router", router), ("decode-0@77", decode)]));
        assert_eq!(
            lines(&waterfall),
            [
                "generate router 0..100",
                "  place router 5..6",
                "  claim router 15..90",
                "    decode.await_kv decode-0 17..56",
                "    decode.generate decode-0 56..85",
                "  prefill router 15..55",
            ]
        );
        assert_eq!((waterfall.total_ns, &*waterfall.trace_id), (100_000, &*"ab".repeat(16)));
        assert!(waterfall.moved.is_empty());
    }

    #[test]
    fn another_clock_is_aligned_with_the_call() {
        let router = vec![span(1, 0, "generate", 1_000, 1_100), span(2, 1, "claim", 1_010, 1_090)];
        // 60 us long, in a call of 80 us: 10 us each way. Its clock is 500 us behind.
        let late = vec![span(20, 2, "decode.generate", 520, 580)];
        let waterfall = Waterfall::of(response(vec![("router", router), ("d@1", late)]));
        assert_eq!(
            lines(&waterfall),
            ["generate router 0..100", "  claim router 10..90", "    decode.generate d 20..80"]
        );
        assert_eq!(waterfall.moved, [("d".to_owned(), 500_000)]);
    }

    #[test]
    fn what_is_lost_leaves_the_rest() {
        let circle = vec![span(1, 2, "a", 0, 1), span(2, 1, "b", 0, 1), span(3, 3, "c", 2, 3), span(4, 77, "d", 1, 2)];
        let waterfall = Waterfall::of(response(vec![("router", circle)]));
        assert_eq!(lines(&waterfall), ["d router 1..2", "c router 2..3"], "a circle has no top and is left out");
        assert!(Waterfall::of(RequestTrace::default()).rows.is_empty());
        let two = response(vec![("d@1", vec![span(1, 0, "a", 0, 1)]), ("d@2", vec![span(2, 0, "b", 0, 1)])]);
        assert_eq!(lines(&Waterfall::of(two)), ["a d@1 0..1", "b d@2 0..1"], "two starts are told apart");
    }
}
