//! The lagging device: KV is not there before its fence and is there behind it, waits end, failures are late but typed.

mod common;

use baton_kernels::device::{Device, DeviceError};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_memory::HostPool;
use baton_types::{BlockId, Fence, FenceStatus, MemoryKind};
use common::tiny::{BOUNDS, LAYERS, Tiny, program, rows};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(Numerics::default())
}

fn is_nan(b: &[u8]) -> bool {
    half::bf16::from_le_bytes([b[0], b[1]]).is_nan()
}

fn all_nan(kv: &[u8]) -> bool {
    kv.chunks_exact(2).all(is_nan)
}

fn wait_done(fence: &Fence) {
    let until = Instant::now() + Duration::from_secs(20);
    while fence.poll() == FenceStatus::Pending && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(fence.poll(), FenceStatus::Done);
}

#[test]
fn kv_is_poison_until_its_fence() {
    let lagging = Lagging::new(reference(), LagConfig::default());
    let mut tiny = Tiny::new(&*lagging, false);
    tiny.step(&rows(0, 15, &[4])).unwrap();
    let want = tiny.kv(4, 15);
    assert!(!want.chunks_exact(2).any(is_nan));

    // The same rows again: stale bytes would be the right ones, so only poison can show that they are not there yet.
    lagging.hold();
    let mut fences = Vec::new();
    tiny.launch(&rows(0, 15, &[4]), &mut |layer, fence| fences.push((layer, fence.clone()))).unwrap();
    assert_eq!(fences.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), (0..LAYERS).collect::<Vec<_>>());
    assert!(fences.iter().all(|(_, fence)| fence.poll() == FenceStatus::Pending));
    assert!(all_nan(&tiny.kv(4, 15)));
    lagging.release();
    for (layer, fence) in &fences {
        wait_done(fence);
        // Planes k and v of the layer.
        let each = want.len() / LAYERS as usize;
        let of_layer = *layer as usize * each..(*layer as usize + 1) * each;
        assert!(tiny.kv(4, 15)[of_layer.clone()] == want[of_layer], "layer {layer} behind its fence");
    }
    tiny.finish().unwrap();
    assert!(tiny.kv(4, 15) == want);
}

#[test]
fn a_fence_of_one_layer_does_not_speak_for_the_next() {
    let config = LagConfig { delay: Duration::from_millis(500), ..LagConfig::default() };
    let mut tiny = Tiny::new(&*Lagging::new(reference(), config), false);
    let mut fences = Vec::new();
    tiny.launch(&rows(0, 15, &[4]), &mut |_, fence| fences.push(fence.clone())).unwrap();
    wait_done(&fences[0]);
    assert_eq!(fences[1].poll(), FenceStatus::Pending, "the next layer begins after the delay");
    wait_done(&fences[1]);
}

#[test]
fn reuse_of_blocks_does_not_poison_what_earlier_work_reads() {
    let lagging = Lagging::new(reference(), LagConfig::default());
    let (mut late, mut calm) = (Tiny::new(&*lagging, false), Tiny::new(&*reference(), false));
    for tiny in [&mut late, &mut calm] {
        tiny.step(&rows(0, 12, &[4])).unwrap();
    }
    // A step that reads the block is pending while a later step stores another sequence to it.
    let (reads, stores) = (rows(12, 1, &[4]), rows(0, 3, &[4]));
    let want = [calm.step(&reads).unwrap(), calm.step(&stores).unwrap()];
    lagging.hold();
    for step in [&reads, &stores] {
        late.launch(step, &mut |_, _| ()).unwrap();
    }
    lagging.release();
    for want in want {
        let logits = late.finish().unwrap();
        assert!(logits.into_iter().map(f32::to_bits).eq(want));
    }
    assert!(late.kv(4, 13) == calm.kv(4, 13));
}

#[test]
fn every_wait_ends() {
    let config = LagConfig { queue_max: 1, deadline: Duration::from_millis(20), ..LagConfig::default() };
    let lagging = Lagging::new(reference(), config);
    let mut tiny = Tiny::new(&*lagging, false);
    lagging.hold();
    let launch = |tiny: &mut Tiny| tiny.launch(&rows(0, 1, &[4]), &mut |_, _| ());
    launch(&mut tiny).unwrap();
    let is_late = |result| matches!(result, Err(DeviceError::Failed(message)) if message.contains("within"));
    assert!(is_late(tiny.finish().map(|_| ())));
    assert!(is_late(launch(&mut tiny)), "the queue is full");
    assert!(is_late(tiny.executable.copy_kv(0, BlockId(4), BlockId(5), 1)));
    lagging.release();
    let until = Instant::now() + Duration::from_secs(20);
    let logits = loop {
        match tiny.finish() {
            Ok(logits) => break logits,
            Err(_) => assert!(Instant::now() < until, "the step never ends"),
        }
    };
    assert!(logits.iter().all(|x| x.is_finite()) && !logits.is_empty());
}

#[test]
fn a_pool_is_reached_by_the_device_that_allocated_it() {
    let (lagging, host) = (Lagging::new(reference(), LagConfig::default()), reference());
    let map = Tiny::new(&*host, false).map;
    let remote = lagging.alloc_pool(&map).unwrap();
    assert!(HostPool::of(&remote).is_none(), "its memory has no address");
    let mut on_host = host.compile(program(&*host, false), BOUNDS).unwrap();
    assert_eq!(on_host.bind(remote.clone(), &map), Err(DeviceError::PoolOutOfReach(MemoryKind::Remote)));
    let mut late = lagging.compile(program(&*lagging, false), BOUNDS).unwrap();
    let of_host = host.alloc_pool(&map).unwrap();
    assert_eq!(late.bind(of_host, &map), Err(DeviceError::PoolOutOfReach(MemoryKind::Host)));
    assert_eq!(late.bind(remote, &map), Ok(()));
}
