//! Known answers. A process checks them at its start, in a fraction of a millisecond, before it says that it computes the class.

use super::attend;
use crate::cpu::SimdLevel;
use crate::cpu::known::Attention;
use crate::cpu::threads::Threads;
use crate::device::DeviceError;
use baton_types::Dtype;

const CASES: [Attention; 3] = [
    // Whole groups of elements; two blocks of tokens, of the second of which the rows see unequal parts.
    Attention { dtype: Dtype::Bf16, dim: 64, position: 102, rows: 2, window: None, expected: 0x9b69_0882_4025_d999 },
    // Elements and tokens that do not fill a vector; two splits.
    Attention {
        dtype: Dtype::Bf16,
        dim: 44,
        position: 515,
        rows: 2,
        window: Some(23),
        expected: 0x6e23_9d9b_d2c7_174a,
    },
    // Queries of two tiles of 16.
    Attention { dtype: Dtype::Bf16, dim: 64, position: 60, rows: 6, window: None, expected: 0x3377_9a4e_5f44_8a85 },
];

/// Whether the instructions of a level give the known answers on this processor.
///
/// # Errors
/// If there is no memory for keys and values.
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    let threads = Threads::none();
    Attention::all_right(&CASES, |step, q, scores, out| attend(&threads, level, step, q, scores, out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::Numerics;
    use crate::reference::attention_splits;

    #[test]
    fn the_reference_gives_the_known_answers() {
        let digests = CASES.each_ref().map(|case| {
            case.digest(|step, q, scores, out| attention_splits::attend(Numerics::Bf16x32, step, q, scores, out))
                .unwrap()
        });
        assert_eq!(
            digests.map(|digest| format!("{digest:#018x}")),
            CASES.map(|case| format!("{:#018x}", case.expected))
        );
    }

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
