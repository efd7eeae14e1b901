//! Adapters: what they compute, which rows they leave alone, and what is refused.

mod common;

use baton_kernels::adapter::{Adapter, AdapterLinear, Linear};
use baton_kernels::cpu::{CpuConfig, CpuDevice, SimdLevel};
use baton_kernels::device::{Bounds, Device, DeviceError};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::{AdapterSlot, Delta, Join, RowId, SlotRows, StepInput};
use baton_types::{BlockId, BlockTables, Dtype, GroupBlocks};
use common::Random;
use common::tiny::{ADAPTERS, BOUNDS, LAYERS, Tiny, VOCAB, edited, program, shape};
use proptest::prelude::*;
use std::sync::Arc;

const F32: Numerics = Numerics::F32Fma { weights: Dtype::F32 };

fn reference(numerics: Numerics) -> Arc<dyn Device> {
    ReferenceDevice::new(numerics)
}

fn devices(numerics: Numerics) -> Vec<Arc<dyn Device>> {
    let cpu = |threads, simd| -> Arc<dyn Device> {
        CpuDevice::new(CpuConfig { threads, simd: Some(simd), numerics }).unwrap()
    };
    let fast = SimdLevel::detect().unwrap();
    let lagging = Lagging::new(cpu(2, fast), LagConfig::default());
    vec![cpu(1, fast), cpu(3, fast), cpu(2, SimdLevel::Portable), lagging]
}

/// Changes `linears` of both layers. No rank, and few shapes, are multiples of a vector.
fn adapter(seed: u64, rank: usize, linears: &[Linear]) -> Adapter {
    let mut random = Random(seed);
    let changes = (0..LAYERS).flat_map(|layer| linears.iter().map(move |linear| (layer, *linear)));
    let change = |(layer, linear): (u32, Linear)| {
        let [n, k] = shape(linear);
        let (a, b) = (random.floats(rank * k, 0.5), random.floats(n * rank, 0.5));
        AdapterLinear { layer, linear, a, b, scale: 0.7 }
    };
    Adapter { rank, linears: changes.map(change).collect() }
}

/// Three sequences, in the order of their adapters: slots of them, and none.
const OF: [Option<AdapterSlot>; 3] = [Some(AdapterSlot(2)), None, Some(AdapterSlot(0))];
const LENGTH: usize = 21;

fn load(tiny: &mut Tiny, slot: AdapterSlot, adapter: &Adapter) -> Result<(), DeviceError> {
    tiny.executable.load_adapter(slot, Arc::new(adapter.pack()?))
}

fn with_adapters(device: &dyn Device) -> Tiny {
    let mut tiny = Tiny::new(device, true);
    load(&mut tiny, AdapterSlot(2), &adapter(1, 5, &Linear::ALL)).unwrap();
    load(&mut tiny, AdapterSlot(0), &adapter(2, 20, &[Linear::Query, Linear::Down])).unwrap();
    tiny
}

fn join(slot: usize, adapter: Option<AdapterSlot>) -> Delta {
    let blocks = [2 * slot as u32, 2 * slot as u32 + 1].map(BlockId).to_vec();
    let tables = BlockTables::from_start(GroupBlocks(vec![blocks]));
    Delta::Join(Box::new(Join { slot, tables, adapter, ..Join::default() }))
}

/// Rows of some sequences, each `(slot, from, to)`.
fn step(deltas: Vec<Delta>, rows: &[(usize, usize, usize)]) -> StepInput {
    let id = |position: usize| RowId::Token((position * 7 % VOCAB) as u32);
    let ids: Vec<RowId> = rows.iter().flat_map(|(_, from, to)| (*from..*to).map(id)).collect();
    let segment = |(slot, from, to): &(usize, usize, usize)| SlotRows {
        slot: *slot,
        position: *from,
        rows: to - from,
        ..SlotRows::default()
    };
    let (segments, logit_rows) =
        (rows.iter().map(segment).collect(), (0..ids.len().min(BOUNDS.logit_rows_max)).collect());
    StepInput { deltas, ids, segments, logit_rows, observed: 0..0 }
}

fn run(tiny: &mut Tiny, step: &StepInput) -> Vec<Vec<u32>> {
    tiny.executable.launch(step, &mut |_, _| ()).unwrap();
    let logits = tiny.finish().unwrap();
    logits.chunks(VOCAB).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Logits of every position of the sequence in a slot, computed alone, a row at a time.
fn alone(device: &dyn Device, slot: usize, adapter: Option<AdapterSlot>) -> Vec<Vec<u32>> {
    let mut tiny = with_adapters(device);
    let mut deltas = vec![join(slot, adapter)];
    (0..LENGTH).flat_map(|at| run(&mut tiny, &step(std::mem::take(&mut deltas), &[(slot, at, at + 1)]))).collect()
}

#[test]
fn an_adapter_is_a_change_of_the_weights() {
    let device = reference(F32);
    for linears in Linear::ALL.iter().map(std::slice::from_ref).chain([&Linear::ALL[..]]) {
        let adapter = adapter(3, 4, linears);
        let merge = |layer: u32, linear: Linear, rows: &mut [f32]| {
            let found = adapter.linears.iter().find(|change| (change.layer, change.linear) == (layer, linear));
            let Some(AdapterLinear { a, b, scale, .. }) = found else { return };
            let [n, k] = shape(linear);
            for (i, c) in (0..n).flat_map(|i| (0..k).map(move |c| (i, c))) {
                let change: f64 = (0..4).map(|j| f64::from(b[i * 4 + j]) * f64::from(a[j * k + c])).sum();
                rows[i * k + c] += (f64::from(*scale) * change) as f32;
            }
        };
        let rows = |tiny: &mut Tiny, adapter| -> Vec<f32> {
            let bits = run(tiny, &step(vec![join(0, adapter)], &[(0, 0, 20)]));
            bits.concat().into_iter().map(f32::from_bits).collect()
        };
        let merged = rows(&mut Tiny::of(&*device, edited(&*device, true, &merge)), None);
        let plain = rows(&mut Tiny::new(&*device, true), None);
        let mut tiny = Tiny::new(&*device, true);
        load(&mut tiny, AdapterSlot(1), &adapter).unwrap();
        let adapted = rows(&mut tiny, Some(AdapterSlot(1)));
        let far = |other: &[f32]| adapted.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(
            far(&merged) * 4.0 < far(&plain) && far(&plain) > 0.02,
            "{linears:?}: {} and {}",
            far(&merged),
            far(&plain)
        );
    }
}

#[test]
fn every_row_has_the_bits_it_has_alone_on_the_reference() {
    for numerics in [F32, Numerics::Bf16x32] {
        let want: Vec<_> = (0..3).map(|slot| alone(&*reference(numerics), slot, OF[slot])).collect();
        assert!(want[0] != want[1] && want[1] != want[2] && want[0] != want[2]);
        for device in devices(numerics).into_iter().chain([reference(numerics)]) {
            let name = device.info().name;
            // Without adapters, and without having been beside some.
            let mut plain = Tiny::new(&*device, true);
            let bits = run(&mut plain, &step(vec![join(1, None)], &[(1, 0, 20)]));
            assert!(bits == want[1][..20], "{name}: a row without an adapter");
            for slot in 0..3 {
                assert!(alone(&*device, slot, OF[slot]) == want[slot], "{name}: the rows of {:?}", OF[slot]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Any division of three sequences into chunks, in any order, on any device.
    #[test]
    fn chunks_and_company_change_no_bit(
        order in Just(vec![0usize, 1, 2]).prop_shuffle(),
        chunks in proptest::collection::vec(1usize..7, 40),
        which in 0usize..5,
        bf16 in any::<bool>(),
    ) {
        let numerics = if bf16 { Numerics::Bf16x32 } else { F32 };
        let device = devices(numerics).into_iter().nth(which).unwrap_or_else(|| reference(numerics));
        let mut tiny = with_adapters(&*device);
        let (mut done, mut got) = ([0; 3], [(); 3].map(|()| Vec::new()));
        let mut deltas: Vec<Delta> = (0..3).map(|slot| join(slot, OF[slot])).collect();
        let mut chunks = chunks.into_iter().cycle();
        while done.iter().any(|done| *done < LENGTH) {
            let mut rows = Vec::new();
            for &slot in order.iter() {
                let (from, to) = (done[slot], (done[slot] + chunks.next().unwrap()).min(LENGTH));
                if from < to {
                    rows.push((slot, from, to));
                }
                done[slot] = to;
            }
            let mut bits = run(&mut tiny, &step(std::mem::take(&mut deltas), &rows)).into_iter();
            for (slot, from, to) in rows {
                got[slot].extend(bits.by_ref().take(to - from));
            }
        }
        for slot in 0..3 {
            let want = alone(&*reference(numerics), slot, OF[slot]);
            prop_assert!(got[slot] == want, "{}, the rows of {:?}", device.info().name, OF[slot]);
        }
    }
}

#[test]
fn an_adapter_is_loaded_between_steps_and_not_while_it_is_used() {
    let other = adapter(7, 3, &[Linear::Up]);
    for device in devices(F32).into_iter().chain([reference(F32)]) {
        let name = device.info().name;
        let mut tiny = with_adapters(&*device);
        let used = AdapterSlot(2);
        tiny.executable.launch(&step(vec![join(0, Some(used))], &[(0, 0, 4)]), &mut |_, _| ()).unwrap();
        assert_eq!(load(&mut tiny, used, &other), Err(DeviceError::AdapterInUse(used)), "{name}");
        assert_eq!(tiny.executable.unload_adapter(used), Err(DeviceError::AdapterInUse(used)), "{name}");
        // The step that still runs has the adapter that was loaded when it was launched.
        let leaves = step(vec![Delta::Leave { slot: 0 }, join(1, None)], &[(1, 0, 1)]);
        tiny.executable.launch(&leaves, &mut |_, _| ()).unwrap();
        load(&mut tiny, used, &other).unwrap();
        let first = tiny.finish().unwrap();
        let want = alone(&*device, 0, Some(used))[..4].concat();
        assert!(first.into_iter().map(f32::to_bits).eq(want.iter().copied()), "{name}");
        tiny.finish().unwrap();
        let replaced = run(&mut tiny, &step(vec![join(0, Some(used))], &[(0, 0, 4)])).concat();
        assert_ne!(replaced, want, "{name}");
        // Without a step that says it, the sequence leaves all the same.
        tiny.executable.leave(&[0]).unwrap();
        assert!(matches!(tiny.executable.leave(&[0]), Err(DeviceError::Step(_))), "{name}: it is gone");
        tiny.executable.unload_adapter(used).unwrap();
        let refused = tiny.executable.launch(&step(vec![join(0, Some(used))], &[(0, 0, 4)]), &mut |_, _| ());
        assert_eq!(refused, Err(DeviceError::UnknownAdapter(used)), "{name}");
    }
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let good = adapter(4, 4, &[Linear::Key]);
    for device in devices(F32).into_iter().chain([reference(F32)]) {
        let mut tiny = Tiny::new(&*device, true);
        let slot = AdapterSlot(3);
        let slots_max = ADAPTERS.slots_max;
        assert_eq!(load(&mut tiny, slot, &good), Err(DeviceError::AdapterSlots { slot, slots_max }));
        assert_eq!(tiny.executable.unload_adapter(slot), Err(DeviceError::AdapterSlots { slot, slots_max }));
        // What depends on no program is refused when it is packed.
        for (rank, rank_max) in [(0, 256), (257, 256), (21, 20)] {
            let refused = load(&mut tiny, AdapterSlot(0), &adapter(4, rank, &[Linear::Key]));
            assert_eq!(refused, Err(DeviceError::AdapterRank { rank, rank_max }));
        }
        let mut check = |part: &str, change: &dyn Fn(&mut Adapter)| {
            let mut adapter = good.clone();
            change(&mut adapter);
            match load(&mut tiny, AdapterSlot(0), &adapter) {
                Err(DeviceError::Shape { op: "load_adapter", message }) => assert!(message.contains(part), "{message}"),
                other => panic!("{part}: {other:?}"),
            }
        };
        check("layer 2 of 2", &|adapter| adapter.linears[1].layer = 2);
        check("Key of layer 1: 79 and 64 elements are of no rank 4", &|adapter| adapter.linears[1].a.truncate(79));
        check("80 and 65 elements are of no rank 4", &|adapter| adapter.linears[0].b.push(0.0));
        check("elements are of no rank 3", &|adapter| adapter.rank = 3);
        check("Out of layer 0 is of shape [16, 20], the model's [20, 32]", &|adapter| {
            adapter.linears[0].linear = Linear::Out
        });
        check("Key of layer 0 is changed twice", &|adapter| adapter.linears[1].layer = 0);
        check("not finite", &|adapter| adapter.linears[1].b[5] = f32::INFINITY);
        check("not finite", &|adapter| adapter.linears[1].scale = f32::NAN);
        // Nothing was loaded.
        let refused = tiny.executable.launch(&step(vec![join(0, Some(AdapterSlot(0)))], &[(0, 0, 1)]), &mut |_, _| ());
        assert_eq!(refused, Err(DeviceError::UnknownAdapter(AdapterSlot(0))));
        for rank_max in [0, 257] {
            let adapters = baton_kernels::adapter::AdapterBounds { rank_max, ..ADAPTERS };
            let refused = device.compile(program(&*device, true), Bounds { adapters, ..BOUNDS }).map(|_| ());
            assert!(matches!(refused, Err(DeviceError::Shape { op: "compile", .. })), "{refused:?}");
        }
    }
}

#[test]
fn a_digest_names_all_that_decides_what_is_computed() {
    let base = adapter(4, 4, &[Linear::Key, Linear::Up]);
    let changes: [fn(&mut Adapter); 6] = [
        |adapter| adapter.linears[0].a[3] += 1.0,
        |adapter| adapter.linears[2].b[3] += 1.0,
        |adapter| adapter.linears[1].scale += 1.0,
        |adapter| adapter.linears[0].linear = Linear::Value,
        |adapter| adapter.linears[3].layer = 0,
        |adapter| drop(adapter.linears.pop()),
    ];
    let mut digests = vec![base.digest()];
    for change in changes {
        let mut adapter = base.clone();
        change(&mut adapter);
        assert!(!digests.contains(&adapter.digest()));
        digests.push(adapter.digest());
    }
    assert_eq!(base.clone().digest(), digests[0]);
}
