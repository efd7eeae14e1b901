//! Scalar arithmetic: of the classes, and of sampling.

use super::Run;
use crate::cuda::arguments::known::{KnownCase, KnownCases};
use crate::cuda::arguments::{In, Out, bytes_of};
use crate::cuda::driver::command::Arguments;
use crate::device::DeviceError;
use crate::numerics::{Half, exp, exp2};
use crate::random::Random;
use crate::sampling;
use std::cmp::Ordering;

/// Cases of each operation.
const CASES: usize = 256;

/// Threads of a block.
const THREADS: u32 = 256;

/// What operands are like.
#[derive(Clone, Copy, Debug)]
enum Inputs {
    /// Three f32 of any bits, infinities and NaNs included, special values first.
    Any,
    /// f32 from the first to the second, and two of any bits.
    Between(f32, f32),
    /// Two f64 of a product that is a part of a total of shares.
    Parts,
    /// 64 bits.
    Bits,
    /// Best logit, temperature, logit.
    Logits,
    /// Seed, position, sample.
    Draw,
}

/// An operation of which the device must give the host's bits.
pub(in crate::cuda) struct Operation {
    pub(in crate::cuda) name: &'static str,
    inputs: Inputs,
    /// Whether the answer is an f32, of which all NaNs are one.
    is_f32: bool,
    answer: fn(&KnownCase) -> u64,
}

impl KnownCase {
    fn x(&self) -> f32 {
        f32::from_bits(self.a as u32)
    }

    fn y(&self) -> f32 {
        f32::from_bits(self.b as u32)
    }

    fn z(&self) -> f32 {
        f32::from_bits(self.c)
    }
}

fn bits(x: f32) -> u64 {
    u64::from(x.to_bits())
}

const fn f32_of(name: &'static str, inputs: Inputs, answer: fn(&KnownCase) -> u64) -> Operation {
    Operation { name, inputs, is_f32: true, answer }
}

const fn integer_of(name: &'static str, inputs: Inputs, answer: fn(&KnownCase) -> u64) -> Operation {
    Operation { name, inputs, is_f32: false, answer }
}

/// Everything that rounds, and the functions that are made of it.
pub(in crate::cuda) const OPERATIONS: [Operation; 24] = [
    f32_of("add", Inputs::Any, |c| bits(c.x() + c.y())),
    f32_of("sub", Inputs::Any, |c| bits(c.x() - c.y())),
    f32_of("mul", Inputs::Any, |c| bits(c.x() * c.y())),
    f32_of("fma", Inputs::Any, |c| bits(c.x().mul_add(c.y(), c.z()))),
    f32_of("div", Inputs::Any, |c| bits(c.x() / c.y())),
    f32_of("sqrt", Inputs::Any, |c| bits(c.x().sqrt())),
    f32_of("larger", Inputs::Any, |c| {
        bits(match c.x().partial_cmp(&c.y()) {
            None => f32::NAN,
            // Of two zeros, PTX takes +0; the sign of Rust's is open.
            Some(Ordering::Equal) => f32::from_bits(c.x().to_bits() & c.y().to_bits()),
            Some(Ordering::Less) => c.y(),
            Some(Ordering::Greater) => c.x(),
        })
    }),
    integer_of("to_bf16", Inputs::Between(-1e30, 1e30), |c| Half::Bf16.from_f32(c.x()).into()),
    integer_of("to_f16", Inputs::Between(-70_000.0, 70_000.0), |c| Half::F16.from_f32(c.x()).into()),
    integer_of("to_bf16_pair", Inputs::Between(-1e-38, 1e-38), |c| u64::from(Half::Bf16.from_f32(c.x())) * 0x1_0001),
    integer_of("to_f16_pair", Inputs::Between(-1e-4, 1e-4), |c| u64::from(Half::F16.from_f32(c.x())) * 0x1_0001),
    f32_of("of_bf16", Inputs::Bits, |c| bits(Half::Bf16.to_f32(c.a as u16))),
    f32_of("of_f16", Inputs::Bits, |c| bits(Half::F16.to_f32(c.a as u16))),
    integer_of("to_i32", Inputs::Between(0.0, 65_536.0), |c| c.x() as u64),
    f32_of("of_i32", Inputs::Bits, |c| bits(c.a as i32 as f32)),
    f32_of("of_u32", Inputs::Bits, |c| bits(c.a as u32 as f32)),
    f32_of("exp", Inputs::Between(-110.0, 95.0), |c| bits(exp(c.x()))),
    f32_of("exp2", Inputs::Between(-130.0, 127.0), |c| bits(exp2(c.x()))),
    f32_of("share_exp", Inputs::Between(-90.0, 0.0), |c| bits(sampling::exp::exp(c.x()))),
    integer_of("share", Inputs::Logits, |c| sampling::shares::shares(&[c.z()], c.x(), c.y())[0]),
    integer_of("ordered", Inputs::Between(-1e9, 1e9), |c| sampling::order::ordered(c.x()).into()),
    integer_of("part", Inputs::Parts, |c| (f64::from_bits(c.a) * c.b as f64).ceil() as u64),
    integer_of("of_u64", Inputs::Bits, |c| (c.a as f64).to_bits()),
    integer_of("random", Inputs::Draw, |c| (sampling::random::uniform(c.a, c.c, c.b) * 2f64.powi(53)) as u64),
];

/// The answer to a case, and whether it is an f32, of which all NaNs are one.
#[cfg(any(test, feature = "testing"))]
pub(in crate::cuda) fn answer(case: &KnownCase) -> (u64, bool) {
    let operation = &OPERATIONS[case.operation as usize];
    ((operation.answer)(case), operation.is_f32)
}

/// What rounding and comparisons treat apart.
const SPECIAL: [f32; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    f32::from_bits(1),
    f32::from_bits(0x8000_0001),
    f32::from_bits(0x007f_ffff),
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::EPSILON,
];

impl Inputs {
    fn case(self, i: usize, random: &mut Random, operation: u32) -> KnownCase {
        let any = |random: &mut Random| f32::from_bits(random.next() as u32);
        let number = |x: f32| u64::from(x.to_bits());
        let unit = |random: &mut Random| (random.next() >> 40) as f32 / (1 << 24) as f32;
        let (a, b, c) = match self {
            // All pairs of special values, then others.
            Self::Any if i < CASES / 2 => {
                let (x, y) = (SPECIAL[i % 16], SPECIAL[i / 16 * 5 % 16]);
                (number(x), number(y), SPECIAL[i / 3 % 16].to_bits())
            }
            Self::Any => (number(any(random)), number(any(random)), any(random).to_bits()),
            Self::Between(low, high) => {
                let x = match i {
                    0 => low,
                    1 => high,
                    2 => 0.0,
                    _ => low + (high - low) * unit(random),
                };
                (number(x), number(any(random)), any(random).to_bits())
            }
            Self::Parts => (f64::from(unit(random)).to_bits(), random.next() >> 1 >> (i % 64), 0),
            Self::Bits => (random.next() >> (i % 64), 0, 0),
            Self::Logits => {
                let best = unit(random) * 40.0 - 20.0;
                let temperature = if i.is_multiple_of(2) { 1.0 } else { unit(random) * 2.0 + 0.01 };
                (number(best), number(temperature), (best - unit(random) * 60.0).to_bits())
            }
            Self::Draw => (random.next(), random.next() >> (i % 64), random.next() as u32),
        };
        KnownCase { a, b, c, operation }
    }
}

/// Cases of every operation, with their answers.
pub(super) struct Cases {
    cases: Vec<KnownCase>,
    answers: Vec<u64>,
}

impl Cases {
    pub(super) fn new() -> Self {
        let mut random = Random(2);
        let mut all = Self { cases: Vec::new(), answers: Vec::new() };
        for (number, operation) in OPERATIONS.iter().enumerate() {
            for i in 0..CASES {
                let case = operation.inputs.case(i, &mut random, number as u32);
                all.answers.push((operation.answer)(&case));
                all.cases.push(case);
            }
        }
        all
    }

    /// The first operation of which the device has other bits.
    pub(super) fn first_wrong(&self, run: &mut Run<'_>) -> Result<Option<&'static str>, DeviceError> {
        let count = self.cases.len();
        let arguments = |at: &[_]| {
            let (cases, answers) = (In::at(at[0]), Out::at(at[1]));
            Arguments::KnownCases(KnownCases { cases, answers, count: count as i32, reserved: 0 })
        };
        let blocks = (count as u32).div_ceil(THREADS);
        let operands = [bytes_of(&self.cases)];
        let got =
            run.run("known_cases".to_owned(), blocks, THREADS, &operands, size_of_val(&self.answers[..]), arguments)?;
        let got = got.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
        let wrong = got.zip(&self.answers).zip(&self.cases).find_map(|((got, want), case)| {
            let operation = &OPERATIONS[case.operation as usize];
            let both_nan = || f32::from_bits(got as u32).is_nan() && f32::from_bits(*want as u32).is_nan();
            let same = got == *want || (operation.is_f32 && both_nan());
            (!same).then_some(operation.name)
        });
        Ok(wrong)
    }

    /// Changes the last bit of one answer of an operation, which is no NaN.
    #[cfg(test)]
    pub(super) fn falsify(&mut self, operation: usize) {
        let answers = &mut self.answers[operation * CASES..][..CASES];
        *answers.iter_mut().rfind(|answer| !f32::from_bits(**answer as u32).is_nan()).unwrap() ^= 1;
    }
}
