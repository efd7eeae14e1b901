//! Expanded panels against the rows of the file.

use super::{BLOCK, Format, Order, PANEL, SimdLevel, Threads, Weights, expand};
use crate::quantize::halves;
use crate::storage::StorageFormat;
use half::{bf16, f16};

/// Blocks of any integers, with scales and minima of both signs and of all sizes of f16, subnormal ones and zeros of both signs among them.
fn stored(format: StorageFormat, blocks: usize) -> Vec<u8> {
    let (_, size) = format.block();
    let mut seed = blocks as u32;
    let mut next = || {
        seed = seed.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_add(0x85eb_ca77);
        seed >> 16
    };
    let mut bytes: Vec<u8> = (0..blocks * size).map(|_| next() as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for &at in halves(format) {
            let bits = next() as u16;
            let half = match bits % 4 {
                0 => f16::from_bits(bits & 0x83ff), // Subnormal, or zero.
                1 => f16::from_bits(bits & 0xbfff),
                2 => f16::from_bits(if bits & 0x7c00 == 0x7c00 { bits ^ 0x0400 } else { bits }),
                _ => f16::from_f32((f32::from(bits) - 32768.0) * 1e-6),
            };
            block[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    bytes
}

/// Values of both orders of pair words, by k.
fn value(words: &[u32], pair: usize, stride: usize, f: usize, high: bool) -> u32 {
    let word = words[pair * stride + f];
    if high { word & 0xffff_0000 } else { word << 16 }
}

#[test]
fn every_instruction_set_expands_to_the_rounded_rows_of_the_file() {
    const N: usize = 37; // The last panel has 5 features.
    const STRIDE: usize = 32;
    for format in StorageFormat::QUANTIZED {
        let (elements, _) = format.block();
        let k = 3 * elements;
        let bytes = stored(format, N * 3);
        let weights = Weights::pack(&Threads::none(), Format::of(format).unwrap(), N, k, &bytes).unwrap();
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            for (panel, tiles, first) in [(0, false, 0), (1, true, 16), (2, false, 16), (2, true, 0)] {
                // All blocks but the first.
                let blocks = 1..k / BLOCK;
                let mut words = vec![1; blocks.len() * 16 * STRIDE];
                let order = Order { tiles, stride: STRIDE, first };
                expand(level, weights.format(), weights.panel(panel), blocks.clone(), order, &mut words);
                let mut row = vec![0.0; k];
                for f in 0..PANEL {
                    let feature = panel * PANEL + f;
                    if feature < N {
                        let stored = &bytes[feature * bytes.len() / N..(feature + 1) * bytes.len() / N];
                        format.expand(stored, &mut row);
                    } else {
                        row.fill(0.0);
                    }
                    for (at, x) in row[BLOCK..].iter().enumerate() {
                        let (block, k) = (at / BLOCK, at % BLOCK);
                        let (pair, high) = if tiles { (k / 2, k % 2 == 1) } else { (k / 4 * 2 + k % 2, k % 4 < 2) };
                        let got = value(&words[block * 16 * STRIDE..], pair, STRIDE, first + f, high);
                        let want = bf16::from_f32(*x).to_f32().to_bits();
                        assert!(
                            got == want || feature >= N && got << 1 == 0,
                            "{level:?} {format:?} panel {panel} tiles {tiles}, feature {f}, k {at}: {got:08x} is not {want:08x}"
                        );
                    }
                }
                // What is beside them is left alone.
                let beside = if first == 0 { PANEL..STRIDE } else { 0..PANEL };
                assert!(words.chunks_exact(STRIDE).all(|words| words[beside.clone()].iter().all(|word| *word == 1)));
            }
        }
    }
}
