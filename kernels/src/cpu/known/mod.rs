//! Known answers: what instructions have to compute before a process uses them. Their tables are with the operations.

mod attention;

use super::{SimdLevel, attention_splits, bf16x32, delta, f32fma, i8x32, stored, tensor_core};
use crate::device::DeviceError;
use std::sync::OnceLock;

pub(super) use attention::Attention;

/// 2^`exponent`, subnormal below -126.
pub(super) const fn power(exponent: i32) -> f32 {
    if exponent < -126 {
        f32::from_bits(1 << (149 + exponent))
    } else {
        f32::from_bits(((127 + exponent) as u32) << 23)
    }
}

/// BIG * BIG + 1 rounds to BIG * BIG.
pub(super) const BIG: f32 = power(12);

/// An operation with known answers.
struct Answers {
    of: &'static str,
    /// Whether the instructions of a level that the processor has give them.
    right: fn(SimdLevel) -> Result<bool, DeviceError>,
}

const ALL: &[Answers] = &[
    Answers { of: "products of f32fma", right: f32fma::known_answers },
    Answers { of: "products of bf16x32", right: bf16x32::known_answers },
    Answers { of: "products of i8x32", right: i8x32::known_answers },
    Answers { of: "attention of f32fma", right: f32fma::known_attention },
    Answers { of: "attention of bf16x32 and i8x32", right: attention_splits::known_answers },
    Answers { of: "products and attention of tensor cores", right: tensor_core::known_answers },
    Answers { of: "the gated delta rule", right: delta::known_answers },
    Answers { of: "stored weights", right: |level| Ok(stored::known_answers(level)) },
];

/// The first operation of which the instructions of a level do not give the known answers; `None` if they are all right. Computed once in a
/// process; a warning says what is wrong.
///
/// # Errors
/// If there is no memory for the operands. Then nothing is known.
///
/// # Panics
/// If the processor lacks the level.
pub(super) fn wrong(level: SimdLevel) -> Result<Option<&'static str>, DeviceError> {
    static VERDICTS: [OnceLock<Option<&'static str>>; SimdLevel::ALL.len()] = [const { OnceLock::new() }; _];
    let verdict = &VERDICTS[level as usize];
    if let Some(known) = verdict.get() {
        return Ok(*known);
    }
    let wrong = first_wrong(level, ALL)?;
    Ok(*verdict.get_or_init(|| {
        if let Some(of) = wrong {
            let instructions = level.name();
            tracing::warn!(
                instructions,
                of,
                "this processor does not give the known answers: its instructions are not used"
            );
        }
        wrong
    }))
}

fn first_wrong(level: SimdLevel, all: &[Answers]) -> Result<Option<&'static str>, DeviceError> {
    assert!(level.available(), "{level:?}");
    for Answers { of, right } in all {
        if !right(level).map_err(|error| without_memory(error, level, of))? {
            return Ok(Some(of));
        }
    }
    Ok(None)
}

/// Says what the memory is for.
fn without_memory(error: DeviceError, level: SimdLevel, of: &str) -> DeviceError {
    match error {
        DeviceError::OutOfMemory { kind, bytes, help, .. } => {
            let what = format!("the known answers of {of} with {}", level.name());
            DeviceError::OutOfMemory { kind, bytes, what, help }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::MemoryKind;

    const LEVEL: SimdLevel = SimdLevel::Portable;

    #[test]
    fn the_first_wrong_answer_is_named() {
        let right = Answers { of: "sums", right: |_| Ok(true) };
        let wrong = Answers { of: "products", right: |_| Ok(false) };
        let never = Answers { of: "nothing", right: |_| panic!("the level is wrong already") };
        assert_eq!(first_wrong(LEVEL, &[right]), Ok(None));
        let right = Answers { of: "sums", right: |_| Ok(true) };
        assert_eq!(first_wrong(LEVEL, &[right, wrong, never]), Ok(Some("products")));
    }

    #[test]
    fn an_answer_that_had_no_memory_is_not_wrong() {
        let out = Answers {
            of: "products",
            right: |_| {
                let (what, help) = ("weights".into(), "raise the limit".into());
                Err(DeviceError::OutOfMemory { kind: MemoryKind::Host, bytes: 64, what, help })
            },
        };
        let error = first_wrong(LEVEL, &[out]).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { kind: MemoryKind::Host, bytes: 64, .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("the known answers of products with portable: raise the limit"), "{text}");
    }
}
