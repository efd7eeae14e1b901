//! Kernels of every instruction set against the scalar dot product.

use super::level::Level;
use super::{BLOCK, Rows, Target, Threads, Weights, product};
use crate::cpu::SimdLevel;
use crate::cpu::source::Source;
use crate::cpu::stored::Format;
use crate::host::Store;
use crate::quantize::halves;
use crate::random::Random;
use crate::reference::quantized::{self, Activations};
use crate::storage::StorageFormat;
use baton_skips::{Need, skipped};

/// Stored blocks of any integers, with scales and minima of both signs and of all sizes of f16, zero among them.
fn stored(format: StorageFormat, blocks: usize, random: &mut Random) -> Vec<u8> {
    let (_, size) = format.block();
    let mut bytes: Vec<u8> = (0..blocks * size).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for &at in halves(format) {
            let value = match random.next() % 8 {
                0 => 0.0,
                1 => random.float() * 2f32.powi(-20),
                2 => random.float() * 65504.0,
                _ => random.float() * 0.1,
            };
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        }
    }
    bytes
}

/// Activations of all sizes: blocks of zeros, of tiny and of huge values, some with one that is not finite, and ties.
fn activations(len: usize, random: &mut Random) -> Vec<f32> {
    let mut x = Vec::with_capacity(len);
    while x.len() < len {
        let size = match random.next() % 12 {
            0 => 0.0,
            1 => 1e-40,
            2 => 2f32.powi(-72),
            3 => 1e37,
            _ => 2f32.powi((random.next() % 12) as i32 - 6),
        };
        let ties = random.next().is_multiple_of(4);
        let start = x.len();
        for i in 0..BLOCK {
            // With 127 among halves, each quotient is a tie.
            x.push(if !ties {
                random.float() * size
            } else if i == 0 {
                127.0
            } else {
                (random.next() % 200) as f32 / 2.0 - 50.0
            });
        }
        if random.next().is_multiple_of(40) {
            x[start + 7] = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY][(random.next() % 3) as usize];
        }
    }
    x.truncate(len);
    x
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

/// Every output of `rows` rows times two parts of different heights.
fn check(level: SimdLevel, threads: &Threads, format: StorageFormat, rows: usize, heights: [usize; 2], blocks: usize) {
    let mut random = Random((rows * 31 + heights[0] * 17 + blocks) as u64);
    let (elements, _) = format.block();
    let k = blocks * elements;
    let bytes = heights.map(|n| stored(format, n * blocks, &mut random));
    let pack = |i: usize| Weights::pack(threads, Format::of(format).unwrap(), heights[i], k, &bytes[i]).unwrap();
    let weights = [pack(0), pack(1)];
    let x = activations(rows * k, &mut random);
    let mut input = Rows::default();
    input.quantize(Level::of(level), rows, k, &mut Source::dense(&x, k));
    let scalar: Vec<Activations> = x.chunks(BLOCK).map(Activations::new).collect();
    let per_row = k / BLOCK;
    let wide = bytes.each_ref().map(|bytes| quantized::blocks(format, bytes));

    let mut expanded = vec![0.0; k];
    let mut want = vec![0.0; k];
    for (feature, row) in bytes[0].chunks_exact(bytes[0].len() / heights[0]).enumerate() {
        weights[0].row(feature, &mut expanded);
        format.expand(row, &mut want);
        assert!(expanded.iter().zip(&want).all(|(a, b)| same(*a, *b)), "{format:?}: row {feature}");
    }
    let before = |i: usize| i as f32 * 0.25;
    for store in [Store::Set, Store::Add] {
        let mut outs = heights.map(|n| (0..rows * n).map(before).collect::<Vec<f32>>());
        for ((out, w), n) in outs.iter_mut().zip(&weights).zip(heights) {
            // From the first panel, and from a later one.
            let middle = if n > 16 { 16 } else { n };
            for features in [0..middle, middle..n].into_iter().filter(|features| !features.is_empty()) {
                // SAFETY: `out` has `[rows, n]` elements, and this is the only task.
                let target = unsafe { Target::new(out[features.start..].as_mut_ptr(), n, features, store) };
                product(level, &input, w, target);
            }
        }
        for ((out, wide), n) in outs.iter().zip(&wide).zip(heights) {
            for (i, got) in out.iter().enumerate() {
                let (row, feature) = (i / n, i % n);
                let total = quantized::dot(&scalar[row * per_row..][..per_row], &wide[feature * per_row..][..per_row]);
                let want = if store == Store::Add { before(i) + total } else { total };
                assert!(
                    same(*got, want),
                    "{level:?} {format:?}, {rows} rows, row {row}, feature {feature}: {got:e} is not {want:e}"
                );
            }
        }
    }
}

#[test]
fn every_instruction_set_has_the_bits_of_the_scalar() {
    let threads = [Threads::none(), Threads::start(3).unwrap()];
    for level in SimdLevel::ALL {
        if !level.available() {
            skipped(need(level), "i8x32 on an instruction set", format!("the processor has no {level:?}"));
            continue;
        }
        if level == SimdLevel::AmxScalar && !SimdLevel::Avx512Vnni.available() {
            skipped(Need::Avx512, "i8x32 over a scalar TDPBSSD", "its loops need AVX512_VNNI");
        }
        for format in StorageFormat::QUANTIZED {
            for rows in (1..=18).chain([33, 69]) {
                check(level, &threads[rows % 2], format, rows, [17, 40], 2);
            }
            check(level, &threads[1], format, 3, [200, 1], 9);
        }
        for (format, blocks) in [(StorageFormat::Q4_0, 35), (StorageFormat::Q4_1, 35), (StorageFormat::Q4K, 5)] {
            // More blocks of K than are unpacked at once, and a rest of rows.
            check(level, &threads[0], format, 11, [17, 1], blocks);
        }
        // Five blocks of rows in two passes over the panels.
        check(level, &threads[0], StorageFormat::Q8_0, 80, [17, 1], 112);
    }
}

#[test]
fn a_scale_or_minimum_that_is_not_finite_is_refused() {
    const ROWS: usize = 40;
    for stored_format in StorageFormat::QUANTIZED {
        let (elements, size) = stored_format.block();
        let finite = stored(stored_format, ROWS, &mut Random(1));
        let format = Format::of(stored_format).unwrap();
        let pack = |bytes: &[u8]| Weights::pack(&Threads::none(), format, ROWS, elements, bytes);
        assert!(pack(&finite).is_ok());
        for (&half, row) in halves(stored_format).iter().flat_map(|half| [0, ROWS - 1].map(|row| (half, row))) {
            for value in [half::f16::INFINITY, half::f16::NEG_INFINITY, half::f16::NAN] {
                let mut bytes = finite.clone();
                bytes[row * size + half..][..2].copy_from_slice(&value.to_le_bytes());
                assert!(pack(&bytes).is_err(), "{format:?}: {value} at byte {half} of row {row}");
            }
        }
    }
}
