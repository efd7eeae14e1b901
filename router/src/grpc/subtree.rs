//! Extracts one request from a trace that may contain several: a span and all its descendants. Pure.

use baton_proto::v1::{ProcessSpans, TraceSpan};
use std::collections::{HashMap, HashSet};

/// Keeps only `root` and its descendants, from all processes.
pub(super) fn subtree(processes: &mut [ProcessSpans], root: &[u8]) {
    let mut children: HashMap<&[u8], Vec<&[u8]>> = HashMap::new();
    for span in processes.iter().flat_map(|process| &process.spans) {
        children.entry(&span.parent_span_id).or_default().push(&span.span_id);
    }
    let (mut below, mut open) = (HashSet::from([root.to_vec()]), vec![root]);
    while let Some(parent) = open.pop() {
        for child in children.get(parent).into_iter().flatten() {
            // Ids come from other processes: a cycle ends here.
            if below.insert(child.to_vec()) {
                open.push(child);
            }
        }
    }
    let is_below = |span: &TraceSpan| below.contains(&span.span_id[..]);
    processes.iter_mut().for_each(|process| process.spans.retain(is_below));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(name: &str, spans: &[(u8, u8)]) -> ProcessSpans {
        let span = |&(id, parent): &(u8, u8)| TraceSpan {
            span_id: vec![id].into(),
            parent_span_id: if parent == 0 { Default::default() } else { vec![parent].into() },
            ..Default::default()
        };
        ProcessSpans { process: name.into(), spans: spans.iter().map(span).collect() }
    }

    #[test]
    fn what_stands_under_the_root_stays() {
        // Two requests, 1 and 5, under a caller's span 9, which no process here recorded.
        let mut processes =
            [process("router", &[(2, 1), (1, 9), (6, 5), (5, 9)]), process("decode", &[(3, 2), (4, 3), (7, 6)])];
        subtree(&mut processes, &[1]);
        let ids = |process: &ProcessSpans| process.spans.iter().map(|s| s.span_id[0]).collect::<Vec<_>>();
        assert_eq!(processes.each_ref().map(ids), [vec![2, 1], vec![3, 4]]);
    }

    #[test]
    fn circles_end() {
        let mut processes = [process("router", &[(1, 2), (2, 1), (3, 3)])];
        subtree(&mut processes, &[1]);
        assert_eq!(processes[0].spans.len(), 2);
    }
}
