//! Ratios that are promised of matrix products and of the default model: what the benchmark prints beside those that it measures. Each is
//! a least ratio; `None` where nothing is promised.

use crate::work::{Weights, Work};
use baton_kernels::numerics::Numerics;
use baton_kernels::roofline::MatrixInstruction;
use baton_kernels::storage::StorageFormat;

/// Of a product of so many rows with weights kept in `format`, to the lower roof. Expanding weights on their way has no promise.
pub fn product(numerics: Numerics, format: StorageFormat, rows: usize, instruction: MatrixInstruction) -> Option<f64> {
    let tiles = instruction == MatrixInstruction::Tdpbf16ps;
    match (numerics, rows) {
        (Numerics::Bf16x32, _) if format.is_quantized() => None,
        (Numerics::Bf16x32, 2048) => Some(if tiles { 0.8 } else { 0.85 }),
        (Numerics::Bf16x32, 512) => Some(if tiles { 0.65 } else { 0.75 }),
        (Numerics::I8x32, 2048) => Some(0.6),
        (Numerics::Bf16x32 | Numerics::I8x32, 8 | 32) => Some(0.8),
        _ => None,
    }
}

/// Of prefill, to the peak of the instructions that multiply matrices. With AVX2 alone there is no promise.
pub fn prefill_to_roof(numerics: Numerics, work: Work, instruction: MatrixInstruction) -> Option<f64> {
    match (numerics, work, instruction) {
        (Numerics::Bf16x32, Work::Prefill(512), MatrixInstruction::Tdpbf16ps) => Some(0.55),
        (Numerics::Bf16x32, Work::Prefill(512), MatrixInstruction::Vdpbf16ps | MatrixInstruction::Fma512) => Some(0.65),
        _ => None,
    }
}

/// Of decode, to the bandwidth of reading memory.
pub fn decode_to_bandwidth(weights: Weights, work: Work) -> Option<f64> {
    match (weights, work) {
        (Weights::Bf16, Work::Decode(1, 128)) => Some(0.85),
        (Weights::Stored, Work::Decode(1, 128)) | (_, Work::Decode(1, 2048)) => Some(0.75),
        _ => None,
    }
}

/// To the best other engine on any weights.
pub fn to_best_peer(numerics: Numerics, work: Work) -> Option<f64> {
    match (numerics, work) {
        (Numerics::Bf16x32, Work::Prefill(512 | 2048)) => Some(1.2),
        (_, Work::Decode(1, 2048)) => Some(1.3),
        (_, Work::Decode(8 | 32, _)) => Some(1.5),
        _ => None,
    }
}

/// To llama.cpp on the same 4-bit file.
pub fn to_same_file(weights: Weights, work: Work) -> Option<f64> {
    match (weights, work) {
        (Weights::Stored, Work::Prefill(512 | 2048)) => Some(1.2),
        (Weights::Stored, Work::Decode(1, 128)) => Some(1.0),
        _ => None,
    }
}

/// To `f32fma`, which was the only class once.
pub fn to_f32fma(numerics: Numerics, work: Work) -> Option<f64> {
    match (numerics, work) {
        (Numerics::Bf16x32 | Numerics::I8x32, Work::Prefill(512)) => Some(2.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use MatrixInstruction::{Fma, Fma512, Tdpbf16ps, Vdpbf16ps, Vpdpbusd};
    use Numerics::{Bf16x32, I8x32};
    use baton_types::Dtype;

    const F32FMA: Numerics = Numerics::F32Fma { weights: Dtype::Bf16 };

    #[test]
    fn products_on_tiles_have_their_own_promises() {
        let of = |instruction| [2048, 512, 32, 8].map(|rows| product(Bf16x32, StorageFormat::F32, rows, instruction));
        assert_eq!(of(Tdpbf16ps), [0.8, 0.65, 0.8, 0.8].map(Some));
        for instruction in [Vdpbf16ps, Fma512, Fma] {
            assert_eq!(of(instruction), [0.85, 0.75, 0.8, 0.8].map(Some), "{instruction:?}");
        }
    }

    #[test]
    fn products_of_bytes_have_promises_and_expanded_weights_none() {
        let of = |class, format| [2048, 512, 32, 8].map(|rows| product(class, format, rows, Vpdpbusd));
        assert_eq!(of(I8x32, StorageFormat::Q4_1), [Some(0.6), None, Some(0.8), Some(0.8)]);
        assert_eq!(of(Bf16x32, StorageFormat::Q4_1), [None; 4]);
        assert_eq!(of(F32FMA, StorageFormat::F32), [None; 4]);
    }

    #[test]
    fn prefill_of_512_has_a_share_of_the_roof_by_instructions() {
        let of = |instruction| prefill_to_roof(Bf16x32, Work::Prefill(512), instruction);
        assert_eq!([Tdpbf16ps, Vdpbf16ps, Fma512, Fma].map(of), [Some(0.55), Some(0.65), Some(0.65), None]);
        assert_eq!(prefill_to_roof(Bf16x32, Work::Prefill(2048), Tdpbf16ps), None);
        assert_eq!(prefill_to_roof(F32FMA, Work::Prefill(512), Fma512), None);
    }

    #[test]
    fn decode_of_one_sequence_has_a_share_of_bandwidth_by_weights() {
        let of =
            |weights| [(1, 128), (1, 2048), (8, 128)].map(|(b, c)| decode_to_bandwidth(weights, Work::Decode(b, c)));
        assert_eq!(of(Weights::Bf16), [Some(0.85), Some(0.75), None]);
        assert_eq!(of(Weights::Stored), [Some(0.75), Some(0.75), None]);
    }

    #[test]
    fn other_engines_are_exceeded_by_work() {
        let prefills = |class| [128, 512, 2048].map(|tokens| to_best_peer(class, Work::Prefill(tokens)));
        assert_eq!(prefills(Bf16x32), [None, Some(1.2), Some(1.2)]);
        assert_eq!(prefills(I8x32), [None; 3]);
        let decodes = [(1, 128), (1, 2048), (8, 128), (32, 128), (8, 2048), (32, 2048)];
        let decodes = decodes.map(|(sequences, context)| to_best_peer(I8x32, Work::Decode(sequences, context)));
        assert_eq!(decodes, [None, Some(1.3), Some(1.5), Some(1.5), Some(1.5), Some(1.5)]);
    }

    #[test]
    fn the_same_file_and_the_class_before_are_exceeded() {
        let works = [Work::Prefill(128), Work::Prefill(512), Work::Prefill(2048), Work::Decode(1, 128)];
        let of = |weights| works.map(|work| to_same_file(weights, work));
        assert_eq!(of(Weights::Stored), [None, Some(1.2), Some(1.2), Some(1.0)]);
        assert_eq!(of(Weights::Bf16), [None; 4]);
        assert_eq!([F32FMA, Bf16x32, I8x32].map(|class| to_f32fma(class, works[1])), [None, Some(2.0), Some(2.0)]);
        assert_eq!(to_f32fma(Bf16x32, works[2]), None);
    }
}
