//! Known answers: panels that every instruction set has to expand as the scalar does. A process checks them at its start, in some microseconds.

use super::{BLOCK, Format, Layout, Order, PANEL, SimdLevel, expand, unpack};
use half::{bf16, f16};

const FORMATS: [Format; 6] = [Format::Q4_0, Format::Q4_1, Format::Q8_0, Format::Q4K, Format::Q5K, Format::Q6K];

/// Groups of a panel: integers and scales of every kind, with scales and minima of both signs, some of which are subnormal in f16.
fn panel(format: Format) -> Vec<u8> {
    const GROUPS: usize = 2;
    let layout = Layout::of(format);
    let mut seed = 1u32;
    let mut next = || {
        seed = seed.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_add(0x85eb_ca77);
        seed >> 16
    };
    let mut panel: Vec<u8> = (0..GROUPS * layout.group()).map(|_| next() as u8).collect();
    for group in panel.chunks_exact_mut(layout.group()) {
        // The first 32 bytes are scales; the next 32 are minima where a header has them.
        for half in group[..layout.header.min(64)].chunks_exact_mut(2) {
            let bits = next() as u16;
            let exponent = if bits.is_multiple_of(8) { 0 } else { 0x2000 | bits & 0x0c00 };
            half.copy_from_slice(&f16::from_bits(bits & 0x83ff | exponent).to_le_bytes());
        }
    }
    panel
}

/// Whether these instructions expand panels as the scalar does.
pub(crate) fn known_answers(level: SimdLevel) -> bool {
    FORMATS.into_iter().all(|format| is_right(level, format))
}

fn is_right(level: SimdLevel, format: Format) -> bool {
    const PAIRS: usize = BLOCK / 2;
    let (panel, layout) = (panel(format), Layout::of(format));
    let blocks = panel.len() / layout.group() * layout.blocks;
    let mut words = vec![0; blocks * PAIRS * PANEL];
    let order = Order { tiles: true, stride: PANEL, first: 0 };
    expand(level, format, &panel, 0..blocks, order, &mut words);
    let mut values = [0.0; BLOCK];
    (0..blocks * PANEL).all(|at| {
        let (block, f) = (at / PANEL, at % PANEL);
        unpack(format, &panel, block, f).expand(format, &mut values);
        let mut pairs = values.as_chunks::<2>().0.iter().enumerate();
        pairs.all(|(pair, x)| {
            let [low, high] = x.map(|x| u32::from(bf16::from_f32(x).to_bits()));
            words[(block * PAIRS + pair) * PANEL + f] == high << 16 | low
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert!(known_answers(level), "{level:?}");
        }
    }
}
