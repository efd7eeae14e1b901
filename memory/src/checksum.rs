//! Checksums of KV, which the sink of a transfer compares before it adopts a block.
//!
//! A sum depends only on the bytes that it covers, so it can stay with a cached block. Every word enters with its position and sums are
//! merged by addition, so a device can compute it in any order.
//!
//! Algorithm 1, over little-endian 64-bit words `w`, the tail padded with zeros, in chunks of 128 words: with keys `k` from SplitMix64
//! (Steele, Lea, Flood 2014), a chunk has `nh = Σ ((lo w_i + lo k_i) mod 2³²)·((hi w_i + hi k_i) mod 2³²)` (the NH universal hash of UMAC,
//! RFC 4418) and `plain = Σ w_i`; it contributes `mix(nh + mix(plain + chunk))`, and the sum is `mix(Σ contributions + length)`. `plain`
//! changes with any change inside one word, where NH alone can multiply it by zero.
//!
//! It detects lost, late, misplaced and damaged bytes. It does not protect against a peer that forges them.

use crate::host::sum_chunks;

/// Id of the only algorithm so far.
pub const ALGORITHM: u16 = 1;

const CHUNK_WORDS: usize = 128;
pub(crate) const CHUNK_BYTES: usize = CHUNK_WORDS * 8;

/// Finalizer of SplitMix64: a bijection in which every output bit depends on every input bit.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const KEYS: [u64; CHUNK_WORDS] = {
    let mut keys = [0; CHUNK_WORDS];
    let mut i = 0;
    while i < CHUNK_WORDS {
        keys[i] = mix(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(i as u64 + 1));
        i += 1;
    }
    keys
};

/// Sum of one chunk. Masked 32-bit halves compile to one `pmuludq` for as many words as fit a register.
#[inline(always)]
pub(crate) fn chunk_sum(chunk: &[u8; CHUNK_BYTES], index: u64) -> u64 {
    const LOW: u64 = 0xffff_ffff;
    let (mut nh, mut plain) = (0u64, 0u64);
    for (word, key) in chunk.as_chunks::<8>().0.iter().zip(&KEYS) {
        let word = u64::from_le_bytes(*word);
        let low = word.wrapping_add(*key) & LOW;
        let high = (word >> 32).wrapping_add(*key >> 32) & LOW;
        nh = nh.wrapping_add(low.wrapping_mul(high));
        plain = plain.wrapping_add(word);
    }
    mix(nh.wrapping_add(mix(plain.wrapping_add(index))))
}

/// Sum of these bytes.
pub fn sum(bytes: &[u8]) -> u64 {
    sum_by(bytes.len(), |at, out| out.copy_from_slice(&bytes[at..at + out.len()]))
}

/// Sum of `len` bytes that `read` copies out piece by piece; a piece fits the first-level cache.
pub(crate) fn sum_by(len: usize, read: impl Fn(usize, &mut [u8])) -> u64 {
    let mut total = len as u64;
    let mut buffer = [0u8; 4 * CHUNK_BYTES];
    for at in (0..len).step_by(buffer.len()) {
        let valid = buffer.len().min(len - at);
        let padded = valid.next_multiple_of(CHUNK_BYTES);
        read(at, &mut buffer[..valid]);
        buffer[valid..padded].fill(0);
        let chunks = buffer[..padded].as_chunks().0;
        total = total.wrapping_add(sum_chunks(chunks, (at / CHUNK_BYTES) as u64));
    }
    mix(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Values of algorithm 1. They must never change, because sums stay with cached blocks and are exchanged between versions.
    #[test]
    fn known_answers() {
        let counting: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        let answers = [sum(b""), sum(b"a"), sum(&counting[..1024]), sum(&counting)];
        assert_eq!(answers.map(|a| format!("{a:016x}")), KNOWN);
    }
    const KNOWN: [&str; 4] = ["0000000000000000", "2043bbbeca2e1561", "ee772b0f5d4b64f4", "e8b3b106b1c733b2"];

    proptest! {
        #[test]
        fn any_changed_byte_changes_the_sum(mut bytes in prop::collection::vec(any::<u8>(), 1..6000), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let before = sum(&bytes);
            let i = at.index(bytes.len());
            bytes[i] ^= flip;
            prop_assert_ne!(sum(&bytes), before);
        }

        #[test]
        fn order_and_length_count(mut bytes in prop::collection::vec(any::<u8>(), 16..6000), a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>()) {
            let before = sum(&bytes);
            let (a, b) = (a.index(bytes.len()), b.index(bytes.len()));
            bytes.push(0);
            prop_assert_ne!(sum(&bytes), before);
            bytes.pop();
            bytes.swap(a, b);
            prop_assert_eq!(sum(&bytes) != before, bytes[a] != bytes[b]);
        }
    }
}
