//! SentencePiece's rules of normalization in its own format (`precompiled_charsmap`): the size of a trie, the trie, and the
//! replacements, each with a zero behind it. The trie is a double array of Darts-clone, of 32-bit numbers.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::TextError;

/// Patterns and what replaces them. Without bytes there are none.
#[derive(Default)]
pub(crate) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

/// The unit is a value, not a node.
const IS_VALUE: u32 = 1 << 31;
/// Label of a node: the byte that leads to it.
const LABEL: u32 = IS_VALUE | 0xff;
/// A pattern ends at the node; its value is the child with label zero.
const HAS_VALUE: u32 = 1 << 8;

impl Charsmap {
    /// Every place in the trie, and each replacement, is checked.
    pub(crate) fn try_new(bytes: &[u8]) -> Result<Self, TextError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let read = read(bytes).filter(|charsmap| charsmap.is_sound().is_some());
        read.ok_or_else(|| TextError::Broken("its precompiled_charsmap is damaged".to_owned()))
    }

    /// Reads the form that a `tokenizer.json` has it in.
    pub(super) fn from_base64(text: &str) -> Result<Self, TextError> {
        let bytes = STANDARD.decode(text);
        Self::try_new(&bytes.map_err(|e| TextError::Broken(format!("its precompiled_charsmap is no base64: {e}")))?)
    }

    /// The longest pattern at the start of the text: its length in bytes, and what replaces it.
    pub(super) fn longest<'a>(&'a self, text: &str) -> Option<(usize, &'a str)> {
        let mut base = children(self.unit(0)?);
        let mut found = None;
        for (byte, end) in text.bytes().zip(1..) {
            let Some((unit, below)) = self.child(base, byte) else { break };
            base = below;
            if unit & HAS_VALUE != 0 && text.is_char_boundary(end) {
                found = Some((end, base));
            }
        }
        let (end, base) = found?;
        Some((end, self.replacement(self.unit(base)?)?))
    }

    fn unit(&self, at: u32) -> Option<u32> {
        self.units.get(at as usize).copied()
    }

    /// The child of a node, whose children are around `base`, and where the child's own are.
    fn child(&self, base: u32, byte: u8) -> Option<(u32, u32)> {
        let at = base ^ u32::from(byte);
        let unit = self.unit(at)?;
        // Zero ends a pattern, and is in none.
        (byte != 0 && unit & LABEL == u32::from(byte)).then_some((unit, at ^ children(unit)))
    }

    fn replacement(&self, value: u32) -> Option<&str> {
        self.replacements.get((value & !IS_VALUE) as usize..)?.split_once('\0').map(|(text, _)| text)
    }

    fn is_sound(&self) -> Option<()> {
        let mut seen = vec![false; self.units.len()];
        let mut bases = vec![children(self.unit(0)?)];
        while let Some(base) = bases.pop() {
            // All places beside it, too: those of a block of 256.
            self.unit(base | 0xff)?;
            // Branches share what they end with.
            if std::mem::replace(&mut seen[base as usize], true) {
                continue;
            }
            for byte in 1..=u8::MAX {
                let Some((unit, below)) = self.child(base, byte) else { continue };
                if unit & HAS_VALUE != 0 {
                    self.replacement(self.unit(below)?)?;
                }
                bases.push(below);
            }
        }
        Some(())
    }
}

fn read(bytes: &[u8]) -> Option<Charsmap> {
    let (size, rest) = bytes.split_first_chunk::<4>()?;
    let (trie, replacements) = rest.split_at_checked(u32::from_le_bytes(*size) as usize)?;
    let (units, odd) = trie.as_chunks::<4>();
    let units = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let replacements = String::from_utf8(replacements.to_vec()).ok()?;
    odd.is_empty().then_some(Charsmap { units, replacements })
}

pub(super) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Where the children of a node are, relative to it.
fn children(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: usize = 1 ^ 97;
    const B: usize = 4 ^ 98;

    /// One block: the root leads by `a` to a node with the value 0, and that one by `b` to one with the value 2.
    fn small() -> Vec<u32> {
        let mut units = vec![0; 256];
        // Its children are around 1, those of `a` around 4, and those of `b` around 8.
        units[0] = 1 << 10;
        units[A] = (A as u32 ^ 4) << 10 | HAS_VALUE | 97;
        units[B] = (B as u32 ^ 8) << 10 | HAS_VALUE | 98;
        units[4] = IS_VALUE;
        units[8] = IS_VALUE | 2;
        units
    }

    fn bytes(units: &[u32], replacements: &[u8]) -> Vec<u8> {
        let size = 4 * units.len() as u32;
        [&size.to_le_bytes()[..], &units.iter().flat_map(|unit| unit.to_le_bytes()).collect::<Vec<_>>(), replacements]
            .concat()
    }

    #[test]
    fn the_longest_pattern_is_found() {
        let charsmap = Charsmap::try_new(&bytes(&small(), b"x\0yz\0")).unwrap();
        for (text, found) in [
            ("a", Some((1, "x"))),
            ("aab", Some((1, "x"))),
            ("abb", Some((2, "yz"))),
            ("b", None),
            ("", None),
            ("\0", None),
        ] {
            assert_eq!(charsmap.longest(text), found, "{text:?}");
        }
        assert_eq!(Charsmap::try_new(&[]).unwrap().longest("a"), None);
    }

    #[test]
    fn a_damaged_one_is_refused() {
        let refused =
            |bytes: Vec<u8>| Charsmap::try_new(&bytes).err().is_some_and(|e| e.to_string().contains("damaged"));
        let changed = |at: usize, unit: u32| {
            let mut units = small();
            units[at] = unit;
            refused(bytes(&units, b"x\0yz\0"))
        };
        assert!(!changed(200, 0));
        assert!(changed(0, 256 << 10), "children outside");
        assert!(changed(B, 256 << 10 | HAS_VALUE | 98), "a value outside");
        assert!(changed(8, IS_VALUE | 5), "a replacement outside");
        assert!(refused(bytes(&small(), b"x\0yz")), "a replacement without an end");
        assert!(refused(bytes(&small(), b"x\0\xff\0")), "no UTF-8");
        assert!(refused(bytes(&small()[..255], b"x\0yz\0")), "cut short");
        assert!(refused(vec![1, 0, 0]), "no size");
        assert!(refused(vec![9, 0, 0, 0, 1]), "no trie");
        // A node that leads to itself ends the check, not never.
        let mut circle = small();
        circle[A] = (A as u32 ^ 1) << 10 | 97;
        assert!(!refused(bytes(&circle, b"x\0yz\0")));
    }
}
