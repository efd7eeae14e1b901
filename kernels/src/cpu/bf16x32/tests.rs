//! Kernels of every instruction set against the scalar dot product, on values that reach the class's corners.

use super::gemm::{Features, gemm};
use super::gemv::{GEMV_ROWS_MAX, gemv};
use super::level::has_tiles;
use super::{Rows, SimdLevel, Target, Weights, product};
use crate::cpu::source::Source;
use crate::cpu::stored;
use crate::cpu::threads::Threads;
use crate::host::Store;
use crate::numerics::flushed;
use crate::random::Random;
use crate::storage::StorageFormat;
use baton_skips::{Need, skipped};
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// A kind of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Values {
    /// In [-1, 1).
    Plain,
    /// Products near the least normal number, subnormal values, zeros of both signs.
    Tiny,
    /// Powers of two with random signs, which cancel often.
    Cancelling,
    /// Any bits except NaN, so infinities and overflow too.
    Any,
}

impl Values {
    /// All kinds.
    const ALL: [Self; 4] = [Self::Plain, Self::Tiny, Self::Cancelling, Self::Any];

    /// One value.
    fn next(self, random: &mut Random) -> f32 {
        let bits = random.next();
        match self {
            Self::Plain => random.float(),
            Self::Tiny => match bits % 16 {
                0 => 0.0,
                1 => -0.0,
                2 | 3 => f32::from_bits(bits as u32 & 0x807f_ffff ^ (bits >> 32) as u32 & 0x8000_0000),
                4 => random.float(),
                _ => random.float() * 2f32.powi(-63 - (bits >> 8 & 15) as i32 + 6),
            },
            Self::Cancelling => {
                let x = 2f32.powi((bits >> 8 & 31) as i32 - 16) * if bits & 64 == 0 { 1.0 } else { 1.0 + 1.0 / 128.0 };
                if bits & 128 == 0 { x } else { -x }
            }
            Self::Any => match f32::from_bits(bits as u32) {
                x if x.is_nan() => 0.0,
                // Infinity and overflow in some sums only.
                x if bits >> 32 & 255 == 0 => x,
                x => f32::from_bits(x.to_bits() & 0xbfff_ffff | 0x2000_0000),
            },
        }
    }
}

/// What a machine without the level lacks.
fn need(level: SimdLevel) -> Need {
    match level {
        SimdLevel::Amx => Need::Amx,
        _ if level <= SimdLevel::Avx2Fma => Need::Avx2,
        _ => Need::Avx512,
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Every output of `[m, k]` times `[n, k]`.
fn check(level: SimdLevel, [m, n, k]: [usize; 3], values: Values) {
    let mut random = Random((m * 31 + n * 17 + k) as u64);
    let x: Vec<f32> = (0..m * k).map(|_| values.next(&mut random)).collect();
    let w: Vec<bf16> = (0..n * k).map(|_| bf16::from_f32(values.next(&mut random))).collect();
    let weights =
        Weights::pack(level, &[n], k, |_, feature, out| out.copy_from_slice(&w[feature * k..(feature + 1) * k]))
            .unwrap();
    let mut row = vec![0.0; k];
    for (feature, stored) in w.chunks_exact(k).enumerate() {
        weights.row(feature, &mut row);
        assert!(row.iter().zip(stored).all(|(a, b)| same(*a, b.to_f32())), "row {feature}");
    }
    let mut rows = Rows::default();
    rows.pack(level, m, k, &mut Source::dense(&x, k));
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let before = |i: usize| i as f32 * 0.25;
    for (store, streams) in [(Store::Set, false), (Store::Add, false), (Store::Set, true), (Store::Add, true)] {
        if streams && m > GEMV_ROWS_MAX {
            continue;
        }
        let mut out: Vec<f32> = (0..m * n).map(before).collect();
        // SAFETY: `out` has `[m, n]` elements, and this is the only task.
        let target = unsafe { Target::new(out.as_mut_ptr(), n, 0..n, store) };
        let mut epilogue = Features { target, first_panel: 0 };
        if streams {
            gemv(&rows, &weights, 0..weights.panels(), &mut epilogue);
        } else {
            gemm(&rows, &weights, 0..weights.panels(), &mut epilogue);
        }
        for (i, got) in out.iter().enumerate() {
            let (x, w) = (&rounded[i / n * k..][..k], &w[i % n * k..][..k]);
            let total = flushed::dot(x.reinterpret_cast(), w.reinterpret_cast());
            let want = if store == Store::Add { before(i) + total } else { total };
            assert!(same(*got, want), "{level:?} {values:?} [{m}, {n}, {k}] {store:?} at {i}: {got:e} is not {want:e}");
        }
    }
}

/// The same product with weights that stay as a file stores them, and with their bf16.
fn check_stored(level: SimdLevel, m: usize, heights: [usize; 2], k: usize) {
    let (format, mut random) = (StorageFormat::Q4_1, Random((m * 31 + k) as u64));
    let bytes = heights.map(|n| {
        let mut bytes: Vec<u8> = (0..n * format.row_bytes(k).unwrap()).map(|_| random.next() as u8).collect();
        bytes.chunks_exact_mut(format.block().1).for_each(|block| (block[1], block[3]) = (0x2c, 0xa8));
        bytes
    });
    let threads = Threads::none();
    let parts =
        [0, 1].map(|i| stored::Weights::pack(&threads, stored::Format::Q4_1, heights[i], k, &bytes[i]).unwrap());
    let expanded = Weights::pack(level, &heights, k, |part, feature, out| {
        let mut row = vec![0.0; k];
        format.expand(&bytes[part][feature * format.row_bytes(k).unwrap()..][..format.row_bytes(k).unwrap()], &mut row);
        out.iter_mut().zip(&row).for_each(|(to, x)| *to = bf16::from_f32(*x));
    })
    .unwrap();
    let weights = Weights::stored(level, parts.into());
    let (mut rows, mut want) = (vec![0.0; k], vec![0.0; k]);
    for feature in [0, heights[0] - 1] {
        weights.row(feature, &mut rows);
        expanded.row(feature, &mut want);
        assert_eq!(rows, want, "row {feature}");
    }
    let x: Vec<f32> = (0..m * k).map(|_| random.float()).collect();
    let mut rows = Rows::default();
    rows.pack(level, m, k, &mut Source::dense(&x, k));
    let [got, want] = [&weights, &expanded].map(|weights| {
        let mut outs = heights.map(|n| vec![0.25; m * n]);
        for (part, (out, n)) in outs.iter_mut().zip(heights).enumerate() {
            // SAFETY: `out` has `[m, n]` elements, and this is the only task.
            let target = unsafe { Target::new(out.as_mut_ptr(), n, 0..n, Store::Add) };
            product(&rows, weights, part, target);
        }
        outs
    });
    assert_eq!(got, want, "{level:?} [{m}, {heights:?}, {k}]");
}

#[test]
fn weights_as_the_file_stores_them_have_the_bits_of_their_bf16() {
    for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
        // Few rows take parts of a panel, many a whole one; parts end within a panel, and K within and beyond a tile's groups.
        for m in [1, 3, 5, 32, 33, 200] {
            check_stored(level, m, [40, 65], 576);
        }
        check_stored(level, 2, [16, 1], 32);
        check_stored(level, 40, [33, 32], 4160);
        check_stored(level, 600, [32, 16], 1536);
    }
}

#[test]
fn every_instruction_set_has_the_bits_of_the_scalar() {
    for level in SimdLevel::ALL {
        if !level.available() {
            skipped(need(level), "bf16x32 on an instruction set", format!("the processor has no {level:?}"));
            continue;
        }
        for values in Values::ALL {
            // Every height of a tile, ragged ends of rows, features and K, and more groups than one.
            for m in (1..=17).chain([29, 32, 33, 50]) {
                check(level, [m, 33, 70], values);
            }
            for shape in [[3, 100, 32], [2, 1, 1], [5, 31, 31], [1, 64, 5000], [15, 32, 4200], [33, 16, 4128]] {
                check(level, shape, values);
            }
        }
        // More rows than a strip, of more groups than a tile: one pass over the panels, and two of them, the last of which may have fewer
        // blocks of rows.
        for m in [33, 63, 66] {
            check(level, [m, 33, 4200], Values::Plain);
        }
        if has_tiles(level) {
            // Two passes of twice as many rows, with totals beside the target and in it, whose rows lie side by side or further apart.
            for shape in [[130, 33, 4200], [130, 32, 4200], [920, 64, 576]] {
                check(level, shape, Values::Plain);
            }
        }
    }
}
