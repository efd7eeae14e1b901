//! Known answers of attention. A process checks them at its start, in a fraction of a millisecond, before it says that it computes the class.

use super::attend;
use crate::cpu::known::Attention;
use crate::cpu::threads::Threads;
use crate::cpu::{Level, SimdLevel};
use crate::device::DeviceError;
use baton_types::Dtype;

const CASES: [Attention; 3] = [
    // Two slabs, of the second of which the rows see unequal parts.
    Attention { dtype: Dtype::Bf16, dim: 64, position: 102, rows: 2, window: None, expected: 0xf2fa_d561_4c09_066d },
    Attention { dtype: Dtype::F32, dim: 64, position: 102, rows: 2, window: None, expected: 0x7822_5264_7912_69a0 },
    // Elements and tokens that do not fill a vector; a window that begins in the slab before.
    Attention {
        dtype: Dtype::Bf16,
        dim: 44,
        position: 515,
        rows: 2,
        window: Some(23),
        expected: 0x3689_2a1e_d51c_19fb,
    },
];

/// Whether the instructions of a level give the known answers on this processor.
///
/// # Errors
/// If there is no memory for keys and values.
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    let (threads, level) = (Threads::none(), Level::of(level));
    Attention::all_right(&CASES, |step, q, scores, out| attend(&threads, level, step, q, scores, out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::ATTENTION_SLAB;
    use crate::reference::attention;

    #[test]
    fn the_reference_gives_the_known_answers() {
        let digests = |shift: usize| {
            CASES.each_ref().map(|case| {
                let digest = case.digest(|step, q, scores, out| {
                    attention::attend(step, q, scores, out, |_, t| (t + shift).is_multiple_of(ATTENTION_SLAB));
                });
                format!("{:#018x}", digest.unwrap())
            })
        };
        let expected = CASES.each_ref().map(|case| format!("{:#018x}", case.expected));
        assert_eq!(digests(0), expected);
        // They depend on where slabs begin.
        assert!(digests(1).iter().zip(&expected).all(|(other, expected)| other != expected));
    }

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
