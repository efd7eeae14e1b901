//! Programs: every device has the bits of the reference, rows do not depend on their company, and what does not fit is refused by name
//! before anything runs.

mod common;

use baton_kernels::cpu::{CpuConfig, CpuDevice, CpuKernels, SimdLevel};
use baton_kernels::device::{Bounds, Device, DeviceError, Role, RopeTable, STEPS_MAX, StoredRows, WeightSpec};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_kernels::program::{Activation, Norm, Op, Program, Project, Qkv, QueryKeyNorms};
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::step::TableSteps;
use baton_kernels::storage::StorageFormat;
use baton_types::{BlockId, Dtype, KvLayout, KvPoolMap, MemoryKind};
use common::Random;
use common::tiny::{BLOCKS, Rows, Tiny, bounds, load, program, rows};
use common::{recorded, reference_of};
use std::sync::Arc;

fn reference() -> Arc<dyn Device> {
    ReferenceDevice::new(Numerics::default())
}

fn cpu(threads: usize, simd: SimdLevel) -> Arc<dyn Device> {
    CpuDevice::new(CpuConfig { threads, simd: Some(simd), ..CpuConfig::default() }).unwrap()
}

fn devices() -> Vec<Arc<dyn Device>> {
    let fast = SimdLevel::detect().unwrap();
    let late = Lagging::new(cpu(1, fast), LagConfig::default());
    let mut devices: Vec<Arc<dyn Device>> = vec![cpu(1, fast), cpu(3, fast), cpu(2, SimdLevel::Portable), late];
    devices.extend(recorded());
    devices
}

/// Two sequences: a prompt, then rows of both together.
fn steps() -> [Rows; 2] {
    let mut both = rows(19, 4, &[5, 2]);
    let other = rows(0, 3, &[7]);
    both.ids.extend(other.ids);
    both.segments.extend(other.segments);
    both.logit_rows = vec![6, 0, 3];
    [rows(0, 19, &[5, 2]), both]
}

fn outcome(device: &dyn Device, rich: bool) -> (Vec<Vec<u32>>, Vec<Vec<u8>>) {
    let mut tiny = Tiny::new(device, rich);
    let logits = steps().iter().map(|step| tiny.step(step).unwrap()).collect();
    (logits, vec![tiny.kv(5, 16), tiny.kv(2, 7), tiny.kv(7, 3)])
}

#[test]
fn every_device_has_the_bits_of_the_reference() {
    for device in devices() {
        let [plain, rich] = [false, true].map(|rich| outcome(&*reference_of(&*device), rich));
        assert_ne!(plain, rich);
        assert!(plain.0.iter().chain(&rich.0).flatten().all(|&bits| f32::from_bits(bits).is_finite()));
        assert!(outcome(&*device, false) == plain, "{}", device.info().name);
        assert!(outcome(&*device, true) == rich, "{} with biases, head norms and a window", device.info().name);
    }
}

#[test]
fn a_row_is_the_same_alone_and_in_company() {
    for rich in [false, true] {
        for device in devices().into_iter().chain([reference()]) {
            let (together, kv) = outcome(&*reference_of(&*device), rich);
            let mut tiny = Tiny::new(&*device, rich);
            let alone: Vec<Vec<u32>> =
                (0..23).map(|position| tiny.step(&rows(position, 1, &[5, 2])).unwrap()).collect();
            let other: Vec<Vec<u32>> = (0..3).map(|position| tiny.step(&rows(position, 1, &[7])).unwrap()).collect();
            assert!(alone[..19].concat() == together[0], "{}", device.info().name);
            assert!([&other[2][..], &alone[19], &alone[22]].concat() == together[1], "{}", device.info().name);
            assert!(vec![tiny.kv(5, 16), tiny.kv(2, 7), tiny.kv(7, 3)] == kv, "{}", device.info().name);
        }
    }
}

#[test]
fn a_step_without_logits_stores_the_same_kv() {
    for device in devices() {
        let mut tiny = Tiny::new(&*device, true);
        for mut step in steps() {
            step.logit_rows.clear();
            assert!(tiny.step(&step).unwrap().is_empty());
        }
        let (_, kv) = outcome(&*reference_of(&*device), true);
        assert!(vec![tiny.kv(5, 16), tiny.kv(2, 7), tiny.kv(7, 3)] == kv, "{}", device.info().name);
    }
}

#[test]
fn a_copy_is_used_like_the_original() {
    for device in devices().into_iter().chain([reference()]) {
        let mut tiny = Tiny::new(&*device, false);
        tiny.step(&rows(0, 11, &[5])).unwrap();
        let want = tiny.step(&rows(11, 1, &[5])).unwrap();
        tiny.executable.copy_kv(0, BlockId(5), BlockId(3), 11).unwrap();
        assert!(tiny.kv(3, 11) == tiny.kv(5, 11) && tiny.kv(3, 12) != tiny.kv(5, 12), "{}", device.info().name);
        assert!(tiny.step(&rows(11, 1, &[3])).unwrap() == want, "{}", device.info().name);
    }
}

/// Work runs in the order of the calls: what is copied is stored by a step that has not ended.
#[test]
fn a_copy_comes_behind_the_steps_before_it() {
    for device in devices().into_iter().chain([reference()]) {
        let mut tiny = Tiny::new(&*device, false);
        tiny.launch(&rows(0, 11, &[5]), &mut |_, _| ()).unwrap();
        tiny.executable.copy_kv(0, BlockId(5), BlockId(3), 11).unwrap();
        tiny.finish().unwrap();
        assert!(tiny.kv(3, 11) == tiny.kv(5, 11), "{}", device.info().name);
    }
}

#[test]
fn steps_that_break_a_bound_are_refused() {
    for device in devices().into_iter().chain([reference()]) {
        let mut tiny = Tiny::new(&*device, false);
        let good = steps()[1].clone();
        let mut check = |expected: &str, change: fn(&mut Rows)| {
            let mut step = good.clone();
            change(&mut step);
            let refused = tiny.launch(&step, &mut |_, _| panic!("refused steps launch nothing"));
            let Err(DeviceError::Step(message)) = refused else { panic!("{expected}: {refused:?}") };
            assert!(message.contains(expected), "{message}");
        };
        check("0 rows, 1 to 24 fit", |s| *s = Rows::default());
        check("300 rows, 1 to 24 fit", |s| s.ids = vec![0; 300]);
        check("segments own 6 rows of 7", |s| s.segments[0].rows = 3);
        check("segments own 18446744073709551615 rows", |s| s.segments[0].rows = usize::MAX);
        check("logit row 7 of 7", |s| s.logit_rows = vec![7]);
        check("8 logit rows, 7 fit", |s| s.logit_rows = vec![0; 8]);
        check("token 11 of a vocabulary of 11", |s| s.ids[6] = 11);
        check("sequences hold 40", |s| s.segments[0].position = 37);
        check("sequences hold 40", |s| s.segments[0].position = usize::MAX);
        check("1 blocks for 23 positions", |s| s.segments[0].table.blocks.truncate(1));
        check("block 8 of a pool of 8", |s| s.segments[0].table.blocks[1] = BlockId(BLOCKS));
        check("0 rows from position 0", |s| {
            let mut empty = s.segments[1].clone();
            empty.rows = 0;
            s.segments.push(empty);
        });
        check("segment 1 stores to block 2, which segment 0 uses too", |s| {
            s.segments[1].table.blocks = vec![BlockId(2)]
        });
        check("segment 1 stores to block 5, which segment 0 uses too", |s| {
            s.segments[1].table.blocks = vec![BlockId(5)]
        });
        check("segment 1 stores to block 5, which segment 0 uses too", |s| {
            // Behind other tokens of the block.
            (s.segments[1].position, s.segments[1].table.blocks) = (3, vec![BlockId(5)]);
        });
        tiny.step(&good).expect("the step itself is fine");
        let copy = |from, to, tokens| (BlockId(from), BlockId(to), tokens);
        for (from, to, tokens) in [copy(1, 1, 4), copy(0, 8, 4), copy(0, 1, 0), copy(0, 1, 17)] {
            let refused = tiny.executable.copy_kv(0, from, to, tokens);
            assert!(matches!(refused, Err(DeviceError::Shape { op: "copy_kv", .. })), "{refused:?}");
        }
        for _ in 0..STEPS_MAX {
            tiny.launch(&good, &mut |_, _| ()).unwrap();
        }
        let refused = tiny.launch(&good, &mut |_, _| panic!("refused steps launch nothing"));
        assert!(matches!(&refused, Err(DeviceError::Step(message)) if message.contains("not finished")), "{refused:?}");
        for _ in 0..STEPS_MAX {
            tiny.finish().unwrap();
        }
        let mut unbound = device.compile(program(&*device, false), bounds(&*device)).unwrap();
        assert_eq!(unbound.launch(&good.input(&mut TableSteps::default()), &mut |_, _| ()), Err(DeviceError::Unbound));
        assert_eq!(unbound.copy_kv(0, BlockId(0), BlockId(1), 1), Err(DeviceError::Unbound));
    }
}

#[test]
fn sequences_share_blocks_that_neither_stores_to() {
    let mut tiny = Tiny::new(&*reference(), false);
    tiny.step(&rows(0, 16, &[5])).unwrap();
    let (mut both, other) = (rows(16, 1, &[5, 2]), rows(16, 1, &[5, 3]));
    both.ids.extend(other.ids);
    both.segments.extend(other.segments);
    both.logit_rows = vec![0, 1];
    let logits = tiny.step(&both).unwrap();
    assert_eq!(logits[..11], logits[11..]);
}

#[test]
fn programs_that_do_not_fit_are_refused() {
    // Of the host, whose kernels take matrices of any size; what GPUs refuse is tested beside them.
    let of_host = devices().into_iter().filter(|device| device.info().memory == MemoryKind::Host);
    for device in of_host.chain([reference()]) {
        let good = program(&*device, true);
        let wide = load(&*device, Role::Out, 21, &[20], &mut Random(1));
        let one_part = load(&*device, Role::Qkv, 20, &[64], &mut Random(1));
        let vector = load(&*device, Role::Vector, 20, &[1], &mut Random(1));
        let short = RopeTable { cos: vec![1.0; 39 * 4], sin: vec![0.0; 39 * 4], dim: 8 };
        let short = device.load_rope(short).unwrap();
        let check = |op: &str, change: &dyn Fn(&mut Vec<Op>)| {
            let mut ops = good.ops.clone();
            change(&mut ops);
            match device.compile(Program { ops }, bounds(&*device)).map(|_| ()) {
                Err(DeviceError::Shape { op: named, message }) => assert_eq!(named, op, "{message}"),
                other => panic!("{op}: {other:?}"),
            }
        };
        fn qkv(ops: &mut [Op]) -> &mut Qkv {
            let Op::Qkv(op) = &mut ops[1] else { panic!("the second operation") };
            op
        }
        check("compile", &|ops| ops.clear());
        check("compile", &|ops| ops.truncate(4));
        check("compile", &|ops| _ = ops.remove(0));
        check("compile", &|ops| _ = ops.remove(2));
        check("compile", &|ops| ops.retain(|op| *op != Op::Select));
        check("compile", &|ops| ops.insert(2, Op::Select));
        check("compile", &|ops| ops.truncate(ops.len() - 1));
        check("compile", &|ops| ops.push(Op::Sample));
        check("qkv", &|ops| qkv(ops).layer = 1);
        check("qkv", &|ops| qkv(ops).heads = 3);
        check("qkv", &|ops| qkv(ops).heads = 6);
        check("qkv", &|ops| qkv(ops).norm = Some(Norm { gain: wide, eps: 1e-5 }));
        // Of each head, or of all of both: eight elements, or 32 of the query and 16 of the key.
        let norm = |k| Norm { gain: load(&*device, Role::Vector, k, &[1], &mut Random(1)), eps: 1e-5 };
        for (query, key) in [(8, 16), (32, 8), (32, 32), (16, 16), (4, 4)] {
            check("qkv", &|ops| qkv(ops).norms = Some(QueryKeyNorms { query: norm(query), key: norm(key) }));
        }
        check("qkv", &|ops| qkv(ops).bias = Some(vector));
        check("qkv", &|ops| qkv(ops).rope = short);
        check("compile", &|ops| qkv(ops).weight = one_part);
        check("attend", &|ops| {
            let Op::Attend(op) = &mut ops[2] else { panic!("the third operation") };
            op.window = Some(0);
        });
        for (weight, partitions) in [(wide, 1), (vector, 1)] {
            check("out", &|ops| ops[3] = Op::Out(Project { partitions, ..Project::plain(weight) }));
        }
        for partitions in [3, 16, 0] {
            check("out", &|ops| {
                let Op::Out(op) = &mut ops[3] else { panic!("the fourth operation") };
                op.partitions = partitions;
            });
        }
        check("attend", &|ops| {
            let Op::Attend(op) = &mut ops[2] else { panic!("the third operation") };
            op.soft_cap = Some(0.0);
        });
        check("out", &|ops| {
            let Op::Out(op) = &mut ops[3] else { panic!("the fourth operation") };
            op.norm = Some(norm(21));
        });
        check("attend", &|ops| {
            let Op::Attend(op) = &mut ops[2] else { panic!("the third operation") };
            op.sinks = Some(norm(3).gain);
        });
        check("out", &|ops| {
            let Op::Out(op) = &mut ops[3] else { panic!("the fourth operation") };
            op.bias = Some(norm(21).gain);
        });
        for (alpha, limit) in [(0.0, 7.0), (1.702, 0.0), (1.702, f32::INFINITY)] {
            check("gate_up", &|ops| {
                let Op::GateUp(op) = &mut ops[4] else { panic!("the fifth operation") };
                op.activation = Activation::ClampedSwiglu { alpha, limit };
            });
        }
        check("down", &|ops| {
            let Op::Down(op) = &mut ops[5] else { panic!("the sixth operation") };
            op.factor = f32::NAN;
        });
        check("embed", &|ops| {
            let Op::Embed(op) = &mut ops[0] else { panic!("the first operation") };
            op.factor = f32::INFINITY;
        });
        check("head", &|ops| {
            let at = ops.len() - 2;
            let Op::Head(op) = &mut ops[at] else { panic!("the last operation but one") };
            op.soft_cap = Some(-30.0);
        });
        for bounds in [
            Bounds { rows_max: 0, ..bounds(&*device) },
            Bounds { logit_rows_max: 0, ..bounds(&*device) },
            Bounds { slots_max: 0, ..bounds(&*device) },
            Bounds { positions_max: 0, ..bounds(&*device) },
            Bounds { positions_max: 41, ..bounds(&*device) },
        ] {
            assert!(matches!(device.compile(good.clone(), bounds), Err(DeviceError::Shape { .. })), "{bounds:?}");
        }
        for (layers, heads, dim) in [(1, 2, 8), (2, 1, 8), (2, 2, 4)] {
            let layout = KvLayout::llama(16, layers, heads, dim, Dtype::Bf16).unwrap();
            let map = KvPoolMap::try_new(layout, 4).unwrap();
            let mut executable = device.compile(good.clone(), bounds(&*device)).unwrap();
            let refused = executable.bind(device.alloc_pool(&map).unwrap(), &map);
            assert!(matches!(refused, Err(DeviceError::Shape { op: "bind", .. })), "{refused:?}");
        }
    }
}

#[test]
fn weights_whose_bytes_do_not_fit_are_refused() {
    let device = reference();
    let stored = |rows, format, bytes| StoredRows { rows, format, bytes };
    let bytes = [0; 1024];
    for (role, k, parts) in [
        (Role::Out, 8, vec![stored(3, StorageFormat::F32, &bytes[..95])]),
        (Role::Out, 8, vec![stored(usize::MAX, StorageFormat::F32, &bytes[..96])]),
        (Role::Out, 8, vec![]),
        (Role::Out, 0, vec![stored(3, StorageFormat::F32, &bytes[..0])]),
        (Role::Out, 33, vec![stored(1, StorageFormat::Q8_0, &bytes[..34])]),
        (Role::Vector, 8, vec![stored(3, StorageFormat::F32, &bytes[..96])]),
    ] {
        let refused = device.load(&WeightSpec { name: "w", role, k, parts: &parts });
        assert!(matches!(refused, Err(DeviceError::Shape { op: "load", .. })), "{parts:?}: {refused:?}");
    }
    let table = RopeTable { cos: vec![1.0; 3], sin: vec![0.0; 4], dim: 4 };
    assert!(matches!(device.load_rope(table), Err(DeviceError::Shape { op: "load_rope", .. })));
}

#[test]
fn impossible_configurations_are_refused() {
    for threads in [0, CpuConfig::THREADS_MAX + 1] {
        assert!(CpuKernels::new(CpuConfig { threads, ..CpuConfig::default() }).is_err());
    }
}
