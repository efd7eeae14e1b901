//! The arithmetic of lanes against the scalar one, bit for bit.

use super::Arithmetic;
use super::operand::Operand;
use super::products::Products;
use super::step::{Group, LANES, RowGroup, decode, range};
use crate::cpu::SimdLevel;
use crate::cpu::simd::{Pass, Wide, Width};
use crate::host::NormOf;
use crate::numerics::tensor_core::inputs::Kind;
use crate::numerics::{Half, Numerics, TensorCore};
use crate::random::Random;
use crate::reference::elementwise;

const CLASSES: [(TensorCore, Half); 4] = [
    (TensorCore::Tc16F25, Half::Bf16),
    (TensorCore::Tc16F25, Half::F16),
    (TensorCore::Tc8F24, Half::Bf16),
    (TensorCore::Tc8F24, Half::F16),
];

/// The vectors that this machine has.
fn widths() -> impl Iterator<Item = (SimdLevel, Width)> {
    let levels = [SimdLevel::Portable, SimdLevel::Avx2Fma, SimdLevel::Avx512];
    levels.into_iter().filter(|level| level.available()).map(|level| (level, Width::of(level)))
}

/// Equal, but for the payload of NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Rows and a panel, both padded with zeros.
struct Operands {
    x: Vec<Vec<u16>>,
    w: Vec<Vec<u16>>,
    sums: Vec<[f32; LANES]>,
}

impl Operands {
    const ROWS: usize = 3;

    fn new(random: &mut Random, half: Half, kind: Kind, k: usize) -> Self {
        Self {
            x: (0..Self::ROWS).map(|_| kind.operands(random, half, k, true)).collect(),
            w: (0..LANES).map(|_| kind.operands(random, half, k, false)).collect(),
            sums: (0..Self::ROWS).map(|_| std::array::from_fn(|_| kind.accumulator(random))).collect(),
        }
    }

    /// Checks all sums of these products.
    fn check(&self, arithmetic: Arithmetic, name: &str) {
        let Arithmetic { cores, half, width } = arithmetic;
        let k = self.x[0].len();
        let mut x = Operand::default();
        x.fill_bits(arithmetic, &self.x.concat(), k);
        let mut panel = vec![[0; LANES]; k.next_multiple_of(cores.group())];
        for (lane, w) in self.w.iter().enumerate() {
            panel.iter_mut().zip(w).for_each(|(to, w)| to[lane] = *w);
        }
        let mut sums = self.sums[1..].to_vec();
        width.run(Products { arithmetic, x: &x, first: 1, panel: &panel, live: None, sums: &mut sums });
        for (row, sums) in sums.iter().enumerate() {
            for (lane, got) in sums.iter().enumerate() {
                let want = cores.dot(half, self.sums[1 + row][lane], &self.x[1 + row], &self.w[lane]);
                assert!(same(*got, want), "{name} {cores:?} {half:?}, k {k}, lane {lane}: {got:e}, {want:e}");
            }
        }
    }
}

#[test]
fn sums_of_products_have_the_bits_of_the_scalar_ones() {
    let mut random = Random(11);
    for (cores, half) in CLASSES {
        for kind in Kind::ALL {
            for k in [1, 7, 8, 9, 16, 17, 31, 40, 72].into_iter().cycle().take(90) {
                let operands = Operands::new(&mut random, half, kind, k);
                for (level, width) in widths() {
                    operands.check(Arithmetic { cores, half, width }, &format!("{level:?} {kind:?}"));
                }
            }
        }
    }
}

/// The exponents of each edge of what vectors compute.
#[test]
fn sums_at_the_ends_of_the_range_have_the_bits_of_the_scalar_ones() {
    let mut random = Random(12);
    let value = |random: &mut Random, exponent: i32| {
        (random.below(2) << 15 | ((exponent + 127) as u32) << 7 | random.below(128)) as u16
    };
    for cores in [TensorCore::Tc16F25, TensorCore::Tc8F24] {
        let half = Half::Bf16;
        for exponent in (-140..-90).chain(115..=128) {
            for _ in 0..20 {
                let k = cores.group();
                let mut of = |low, span| -> Vec<u16> {
                    (0..k)
                        .map(|_| low - random.below(span) as i32)
                        .collect::<Vec<_>>()
                        .into_iter()
                        .map(|e| value(&mut random, e))
                        .collect()
                };
                let low = exponent / 2;
                let x = (0..Operands::ROWS).map(|_| of(low, 14)).collect();
                let w = (0..LANES).map(|_| of(exponent - low, 14)).collect();
                let sign = |random: &mut Random| random.below(2) << 31;
                let below = |random: &mut Random| (exponent - random.below(27) as i32 + 127).clamp(0, 254) as u32;
                let mut acc = || f32::from_bits(sign(&mut random) | below(&mut random) << 23 | random.below(1 << 23));
                let sums = (0..Operands::ROWS).map(|_| std::array::from_fn(|_| acc())).collect();
                let operands = Operands { x, w, sums };
                for (level, width) in widths() {
                    operands.check(Arithmetic { cores, half, width }, &format!("{level:?} 2^{exponent}"));
                }
            }
        }
    }
}

#[test]
fn the_largest_sums_do_not_overflow() {
    for (cores, half) in CLASSES {
        // Of the largest significand, in both formats.
        let [positive, negative] = [0x3fff, 0xbfff];
        for (k, (w, acc)) in [8, 16, 32].into_iter().flat_map(|k| [(k, (positive, 1.0)), (k, (negative, -1.0))]) {
            let acc = f32::from_bits(2f32.to_bits() - 1) * acc;
            let (x, w) = (vec![vec![positive; k]; Operands::ROWS], vec![vec![w; k]; LANES]);
            let operands = Operands { x, w, sums: vec![[acc; LANES]; Operands::ROWS] };
            for (level, width) in widths() {
                operands.check(Arithmetic { cores, half, width }, &format!("{level:?}"));
            }
        }
    }
}

/// Whether vectors compute a step.
struct Taken {
    half: Half,
    x: u16,
    w: u16,
    acc: f32,
}

impl Pass for Taken {
    type Out = bool;

    #[inline(always)]
    fn call<W: Wide>(self, wide: W) -> bool {
        let mut words = [[0; LANES]; 16];
        words[3] = [self.w; LANES];
        let group = Group::decode(self.half, &words);
        let (mut values, mut exponents, mut bits) = ([0.0; 16], [0; 16], [0; 16]);
        bits[3] = self.x;
        decode(self.half, &bits, &mut values, &mut exponents);
        let x = RowGroup { values: &values, exponents: &exponents };
        group.add_products(wide, x, &mut [self.acc; LANES])
    }
}

#[test]
fn ordinary_steps_are_taken_by_vectors() {
    let half = Half::Bf16;
    let power = |exponent| half.from_f32(2f32.powi(exponent));
    let [least, most] = range::<16>();
    for (level, width) in widths() {
        let taken = |x, w, acc| width.run(Taken { half, x, w, acc });
        for e in least..=most {
            assert!(taken(power(e), power(0), 0.0), "{level:?} 2^{e}");
        }
        assert!(!taken(power(least - 1), power(0), 0.0) && !taken(power(most), power(1), 0.0));
        // Nothing but zeros, an accumulator alone, and a small one beside a product.
        assert!(taken(0, 0x8000, -0.0) && taken(0, power(3), 5.0) && taken(power(0), power(3), 1e-45));
        for (x, w, acc) in [(0x7f80, 0, 0.0), (0x8000, 0xff80, 0.0), (0x7fc0, power(1), 0.0), (0, 0, f32::INFINITY)] {
            assert!(!taken(x, w, acc), "{level:?}: {x:#x} * {w:#x} + {acc}");
        }
    }
}

#[test]
fn norms_have_the_bits_of_the_reference() {
    let mut random = Random(5);
    for cols in [1, 10, 31, 512, 513, 1100, 1536] {
        let mut floats =
            |len: usize| -> Vec<f32> { (0..len).map(|_| random.below(4001) as f32 / 999.0 - 2.0).collect() };
        let (x, gain) = (floats(3 * cols), floats(cols));
        let class = Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 };
        let (mut want, mut got) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        elementwise::rms_norm(class, &x, &gain, 1e-5, &mut want);
        for (level, width) in widths() {
            width.run(super::norm::RmsNorm { x: &x, norm: NormOf { gain: &gain, eps: 1e-5 }, out: &mut got });
            let equal = got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits());
            assert!(equal, "{level:?}, {cols} columns");
        }
    }
}

#[test]
fn operands_are_rounded_as_the_format_says() {
    let mut random = Random(6);
    for (cores, half) in CLASSES {
        let all = (0..4000).map(|_| f32::from_bits(random.next() as u32));
        // Ties, the largest values, subnormals.
        let ties = (0..4000).map(|i| f32::from_bits(0x3780_0000 + (i << 15 | i << 12)));
        let special = [65519.0, 65520.0, 65504.0, f32::MAX, f32::INFINITY, f32::NAN, -0.0, 6e-8, 3e-8, 2.9e-8, 1e-45];
        let x: Vec<f32> = all.chain(ties).chain(special).collect();
        for (level, width) in widths() {
            let mut operand = Operand::default();
            operand.fill(Arithmetic { cores, half, width }, &x, x.len());
            for (x, got) in x.iter().zip(&operand.bits) {
                let (got, want) = (half.to_f32(*got), half.round(*x));
                assert!(same(got, want), "{level:?} {half:?}: {x:e} became {got:e}, not {want:e}");
            }
        }
    }
}
