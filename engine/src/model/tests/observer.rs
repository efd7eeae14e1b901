//! A layer is announced once, in order, as early as its KV allows.

use super::{RAGGED, Rig, Rows, tokens};
use baton_types::{Dtype, Fence, FenceStatus};

const LENGTH: usize = 20;

#[test]
fn each_layer_is_announced_when_its_kv_is_stored_and_before_the_next() {
    let mut rig = Rig::reference(RAGGED, Dtype::Bf16, 16);
    let mut batch = rig.batch(&[Rows { sequence: 0, from: 0, to: LENGTH }], &tokens(LENGTH));
    // A chunk in the middle of a prompt wants no logits; its layers are announced all the same.
    batch.logit_rows.clear();
    let pool = rig.pool.clone();
    let empty = pool.kv(0, 0, LENGTH);
    let mut announced = Vec::new();
    let mut observer = |layer: u32, fence: &Fence| {
        assert_eq!(fence.poll(), FenceStatus::Done, "a host backend computes at enqueue");
        announced.push((layer, [0, 1].map(|l| pool.kv(0, l, LENGTH))));
    };
    rig.model.step(&batch, &mut observer).unwrap();
    let last = [0, 1].map(|l| pool.kv(0, l, LENGTH));
    assert!(last.iter().all(|kv| *kv != empty));
    let [first, second] = last;
    assert!(announced == [(0, [first.clone(), empty]), (1, [first, second])], "announced too early, too late or twice");
}
