//! Each layer is reported once, in order, as soon as its KV stores are enqueued, and its fence is correct.

use super::{Batch, RAGGED, Rig, Rows, random, reference, tokens};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_types::{Dtype, Fence, FenceStatus};
use std::time::{Duration, Instant};

const LENGTH: usize = 20;

/// A chunk in the middle of a prompt: it needs no logits, but its layers are still reported.
fn chunk(rig: &Rig) -> Batch {
    let mut batch = rig.batch(&[Rows { sequence: 0, from: 0, to: LENGTH }], &tokens(LENGTH));
    batch.logit_rows.clear();
    batch
}

#[test]
fn each_layer_is_announced_when_its_kv_is_stored_and_before_the_next() {
    let mut rig = Rig::reference(RAGGED, Dtype::Bf16, 16);
    let (pool, batch) = (rig.pool.clone(), chunk(&rig));
    let empty = pool.kv(0, 0, LENGTH);
    let mut announced = Vec::new();
    let mut observer = |layer: u32, fence: &Fence| {
        assert_eq!(fence.poll(), FenceStatus::Done, "a host backend computes at enqueue");
        announced.push((layer, [0, 1].map(|l| pool.kv(0, l, LENGTH))));
    };
    rig.run(&batch, &mut observer).unwrap();
    let [first, second] = [0, 1].map(|l| pool.kv(0, l, LENGTH));
    assert!(first != empty && second != empty && first != second);
    assert!(announced == [(0, [first.clone(), empty]), (1, [first, second])], "announced too early, too late or twice");
}

#[test]
fn a_fence_that_is_done_means_kv_that_stays() {
    let lag = LagConfig { delay: Duration::from_millis(30), ..LagConfig::default() };
    let device = Lagging::new(reference(Dtype::Bf16), lag);
    let mut rig = Rig::new(&random(RAGGED), &*device, Dtype::Bf16, 16);
    let (pool, batch) = (rig.pool.clone(), chunk(&rig));
    let (mut pending, mut seen) = (0, Vec::new());
    let mut observer = |layer: u32, fence: &Fence| {
        pending += usize::from(fence.poll() == FenceStatus::Pending);
        let deadline = Instant::now() + Duration::from_secs(30);
        while fence.poll() == FenceStatus::Pending {
            assert!(Instant::now() < deadline, "the fence of layer {layer} never ends");
            std::thread::yield_now();
        }
        assert_eq!(fence.poll(), FenceStatus::Done);
        seen.push(pool.kv(0, layer as usize, LENGTH));
    };
    rig.run(&batch, &mut observer).unwrap();
    assert!(pending > 0, "a lagging backend lags");
    assert!(seen == [0, 1].map(|layer| pool.kv(0, layer, LENGTH)));
}
