//! Kernels of every instruction set against the scalar dot product, on values that reach the class's corners.

use super::gemm::{Outputs, gemm};
use super::gemv::{GEMV_ROWS_MAX, gemv};
use super::{Rows, SimdLevel, Threads, Weights};
use crate::host::Store;
use crate::numerics::flushed;
use baton_skips::{Need, skipped};
use half::bf16;

/// A small counter-based generator (splitmix64).
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    /// 64 random bits.
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// About uniform in [-1, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * 2f32.powi(-23) - 1.0
    }
}

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
        let bits = random.bits();
        match self {
            Self::Plain => random.unit(),
            Self::Tiny => match bits % 16 {
                0 => 0.0,
                1 => -0.0,
                2 | 3 => f32::from_bits(bits as u32 & 0x807f_ffff ^ (bits >> 32) as u32 & 0x8000_0000),
                4 => random.unit(),
                _ => random.unit() * 2f32.powi(-63 - (bits >> 8 & 15) as i32 + 6),
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
        Weights::pack(level, &[n], k, |_, feature, out| out.copy_from_slice(&w[feature * k..(feature + 1) * k]));
    let mut row = vec![0.0; k];
    for (feature, stored) in w.chunks_exact(k).enumerate() {
        weights.row(feature, &mut row);
        assert!(row.iter().zip(stored).all(|(a, b)| same(*a, b.to_f32())), "row {feature}");
    }
    let mut rows = Rows::default();
    rows.pack(&Threads::none(), level, &x, m, k);
    let rounded: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let before = |i: usize| i as f32 * 0.25;
    for (store, streams) in [(Store::Set, false), (Store::Add, false), (Store::Set, true), (Store::Add, true)] {
        if streams && m > GEMV_ROWS_MAX {
            continue;
        }
        let mut out: Vec<f32> = (0..m * n).map(before).collect();
        // SAFETY: `out` has `[m, n]` elements, and this is the only task.
        let outputs = unsafe { Outputs::new(&weights, std::iter::once(out.as_mut_ptr()), store) };
        if streams {
            gemv(&rows, &weights, 0..weights.panels(), &mut &outputs);
        } else {
            gemm(&rows, &weights, 0..weights.panels(), &mut &outputs);
        }
        for (i, got) in out.iter().enumerate() {
            let (x, w) = (&rounded[i / n * k..][..k], &w[i % n * k..][..k]);
            let total = flushed::dot(x, w);
            let want = if store == Store::Add { before(i) + total } else { total };
            assert!(same(*got, want), "{level:?} {values:?} [{m}, {n}, {k}] {store:?} at {i}: {got:e} is not {want:e}");
        }
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
            for shape in [[3, 100, 32], [2, 1, 1], [5, 31, 31], [1, 64, 5000], [15, 32, 4200]] {
                check(level, shape, values);
            }
        }
    }
}
