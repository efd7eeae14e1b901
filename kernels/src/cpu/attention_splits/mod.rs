//! Paged attention of `bf16x32` and `i8x32`: divides the batch into tasks of (rows of a segment, KV heads, splits).
//!
//! A task packs each block of keys and values once for all its queries: its rows times the query heads that share the KV head. Usually a
//! task covers all splits and merges them in sequence. With fewer tasks than the threads could take (decode of a few long sequences) splits
//! are divided too, and who finishes the last of an item merges them in the same order.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(test, target_arch = "x86_64"))]
mod exp_check;
mod known;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod plan;
mod portable;
#[cfg(target_arch = "x86_64")]
mod states;
#[cfg(target_arch = "x86_64")]
mod work;

use super::threads::Threads;
use super::{Shared, SimdLevel};
use crate::host::{KvStep, Scores};
use baton_types::Dtype;
use plan::{Heads, Item, Plan};
use std::cell::Cell;
use std::ops::Range;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::Ordering;

pub(super) use known::known_answers;

thread_local! {
    static PLAN: Cell<Plan> = const { Cell::new(Plan::new()) };
}

/// Queries and what they attend to.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) step: KvStep<'a>,
    /// Rows of `q.len() / step.rows()`.
    pub(super) q: &'a [f32],
    pub(super) scores: Scores<'a>,
}

#[cfg(target_arch = "x86_64")]
impl Rows<'_> {
    /// The tokens of `start .. start + len` that the row at `position` attends to.
    fn seen(&self, position: usize, start: usize, len: usize) -> Range<usize> {
        self.scores.first(position).max(start)..(position + 1).min(start + len)
    }
}

/// Some splits of an item.
struct Task<'a> {
    rows: Rows<'a>,
    heads: Heads,
    item: &'a Item,
    splits: Range<usize>,
    /// Where to store the state of each split, `[query][split of the item]`; `None`: merge and finish here.
    keep: Option<*mut f32>,
    /// The whole output; only this task stores the item's rows and heads.
    out: *mut f32,
}

/// Whether a level computes by tiles. Their scalar form packs by AVX-512, so that elsewhere it is the reference itself.
fn by_tiles(level: SimdLevel) -> bool {
    level == SimdLevel::Amx || level == SimdLevel::AmxScalar && SimdLevel::Avx512.available()
}

/// Causal attention on these threads.
///
/// # Panics
/// If the planes k and v are not bf16, or the processor lacks the level.
pub(super) fn attend(
    threads: &Threads,
    level: SimdLevel,
    step: KvStep<'_>,
    q: &[f32],
    scores: Scores<'_>,
    out: &mut [f32],
) {
    let rows = Rows { step, q, scores };
    assert!(level.available(), "{level:?}");
    let pool = rows.step.kv;
    for plane in pool.planes() {
        assert_eq!(pool.dtype(plane), Dtype::Bf16, "attention of bf16x32 reads bf16");
    }
    let heads = Heads::new(&rows, step.value_dim(q, out));
    let out = Shared(out.as_mut_ptr());
    let mut plan = PLAN.take();
    // The reference knows no states that it could keep.
    plan.fill(&rows, heads, threads.count(), level <= SimdLevel::Portable, by_tiles(level));
    let states = Shared(plan.states.as_mut_ptr());
    let plan_ref = &plan;
    threads.run_in_order(plan.pieces.len(), &|i| {
        let piece = &plan_ref.pieces[i];
        // SAFETY: offsets were counted item by item, so each item has its own part of the states.
        let keep = plan_ref.divided.then(|| unsafe { states.get().add(plan_ref.offsets[piece.item]) });
        let item = &plan_ref.items[piece.item];
        let task = Task { rows, heads, item, splits: piece.splits.clone(), keep, out: out.get() };
        match level {
            // SAFETY: a level is used only where it is available; the plan's items share no row of a KV head.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::AmxScalar if by_tiles(level) => unsafe { avx512::run_amx_scalar(&task) },
            SimdLevel::AmxScalar | SimdLevel::Portable => portable::run(&task),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2Fma | SimdLevel::Avx512 | SimdLevel::Avx512Vnni => unsafe { avx2::run(&task) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Bf16 => unsafe { avx512::run_vdpbf16ps(&task) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Amx => unsafe { avx512::run_amx(&task) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("not available"),
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(states) = keep
            && plan_ref.pending[piece.item].fetch_sub(1, Ordering::AcqRel) == 1
        {
            let merge_item = if level >= SimdLevel::Avx512Bf16 { avx512::merge_item } else { avx2::merge_item };
            // SAFETY: the item's own part of the states, which all its tasks have written; the level is available.
            unsafe { merge_item(&rows, heads, item, states, out.get()) };
        }
    });
    PLAN.set(plan);
}
