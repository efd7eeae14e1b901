//! The byte alphabet of byte-level BPE: every byte as one printable character (GPT-2's `bytes_to_unicode`).

use std::sync::LazyLock;

/// The character of each byte: printable Latin-1 maps to itself, the others follow from U+0100 in order.
static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => (byte as u8).into(),
        _ => {
            next += 1;
            char::from_u32(next - 1).expect("below U+0144")
        }
    })
});

/// Character of a byte.
pub(crate) fn char(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// Byte of a character of the alphabet.
fn byte(c: char) -> Option<u8> {
    static BYTES: LazyLock<Vec<Option<u8>>> = LazyLock::new(|| {
        let mut bytes = vec![None; 0x144];
        CHARS.iter().zip(0..=255).for_each(|(&c, b)| bytes[c as usize] = Some(b));
        bytes
    });
    BYTES.get(c as usize).copied().flatten()
}

/// The bytes of a word in the alphabet; none if it has other characters.
pub(crate) fn word(spelling: &str) -> Option<Vec<u8>> {
    spelling.chars().map(byte).collect()
}

/// The bytes of a byte-level token; a token with characters outside the alphabet (an added token) gives its own bytes.
pub(crate) fn decode(token: &str) -> Vec<u8> {
    word(token).unwrap_or_else(|| token.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_is_a_bijection_on_bytes() {
        for b in 0..=255u8 {
            assert_eq!(decode(&char(b).to_string()), [b]);
        }
        assert_eq!(decode("Ġhello"), b" hello");
        assert_eq!(decode("two words"), b"two words", "a space is not of the alphabet");
    }
}
