//! Whole items by the scalar reference, for processors without a specific level.

use super::Task;
use crate::reference::attention_splits::ChainsHead;

/// Computes and stores all rows of an item, all splits of it.
pub(super) fn run(task: &Task<'_>) {
    let (item, heads, rows) = (task.item, task.heads, &task.rows);
    assert!(task.keep.is_none() && task.splits == item.splits, "items stay whole");
    assert_eq!(item.kv_heads.len(), 1, "heads are not together");
    let head = ChainsHead::load(rows.step, &rows.step.segments[item.segment], item.kv_heads.start, rows.scores);
    for query in 0..heads.queries(item) {
        let (position, at) = (item.position + heads.row(item, query), heads.offset(item, query));
        let to = heads.offset_out(item, query);
        // SAFETY: the item's rows and heads lie in the output and belong to this task.
        let out = unsafe { std::slice::from_raw_parts_mut(task.out.add(to), heads.value_dim) };
        head.attend(&rows.q[at..at + heads.dim], position, at % heads.cols / heads.dim, out);
    }
}
