//! Known answers of the recurrence.

use super::rule::Strip;
use crate::cpu::SimdLevel;
use crate::cpu::lines::Lines;
use crate::cpu::simd::Width;
use crate::device::DeviceError;
use crate::random::Random;

const ROWS: usize = 3;
const KEY_DIM: usize = 5;
/// Columns that do not fill the vectors of any level.
const COLUMNS: usize = 59;

/// Numbers that look random, so that each result depends on the order and the roundings of its sums.
struct Operands {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
}

impl Operands {
    fn new() -> Self {
        let mut random = Random(1);
        let mut floats = |len| random.floats(len, 1.0);
        let [query, key] = [ROWS * KEY_DIM; 2].map(&mut floats);
        let [value, state] = [ROWS * COLUMNS, KEY_DIM * COLUMNS].map(&mut floats);
        let [decay, beta] = [ROWS; 2].map(|len| floats(len).into_iter().map(f32::abs).collect());
        Self { query, key, value, decay, beta, state }
    }
}

/// FNV-1a, by words.
fn digest(out: &[f32], state: &[f32]) -> u64 {
    let bits = out.iter().chain(state).map(|x| u64::from(x.to_bits()));
    bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| (hash ^ bits).wrapping_mul(0x0100_0000_01b3))
}

const EXPECTED: u64 = 0x7ab0_3008_ea5b_1444;

/// Whether the instructions of a level give the known answers on this processor.
#[allow(clippy::unnecessary_wraps, reason = "of other operations, which need memory that may not be there")]
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    let Operands { query, key, value, decay, beta, mut state } = Operands::new();
    let (mut out, mut room) = (vec![0.0; ROWS * COLUMNS], Lines::default());
    Width::of(level).run(Strip {
        rows: ROWS,
        query: &query,
        key: &key,
        key_stride: KEY_DIM,
        key_dim: KEY_DIM,
        value: &value,
        out: out.as_mut_ptr(),
        value_stride: COLUMNS,
        columns: COLUMNS,
        decay: &decay,
        beta: &beta,
        head_stride: 1,
        read: Some(state.as_ptr()),
        written: state.as_mut_ptr(),
        state_stride: COLUMNS,
        room: room.room(KEY_DIM * 64),
    });
    Ok(digest(&out, &state) == EXPECTED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::delta::update;

    #[test]
    fn the_reference_gives_the_known_answers() {
        let Operands { query, key, value, decay, beta, mut state } = Operands::new();
        let mut out = vec![0.0; ROWS * COLUMNS];
        for row in 0..ROWS {
            let (keys, values) = (row * KEY_DIM..(row + 1) * KEY_DIM, row * COLUMNS..(row + 1) * COLUMNS);
            let (q, k, v) = (&query[keys.clone()], &key[keys], &value[values.clone()]);
            update(&mut state, q, k, v, decay[row], beta[row], &mut out[values]);
        }
        assert_eq!(format!("{:#018x}", digest(&out, &state)), format!("{EXPECTED:#018x}"));
    }

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
