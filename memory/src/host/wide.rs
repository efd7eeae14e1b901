//! Checksums of chunks with the widest vector registers of this machine: one loop, compiled twice.

use crate::checksum::{CHUNK_BYTES, chunk_sum};

/// Contributions of `chunks`, whose first one has number `first`.
pub(crate) fn sum_chunks(chunks: &[[u8; CHUNK_BYTES]], first: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: this machine has AVX2, as was just asked.
        return unsafe { sum_chunks_avx2(chunks, first) };
    }
    portable(chunks, first)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_chunks_avx2(chunks: &[[u8; CHUNK_BYTES]], first: u64) -> u64 {
    portable(chunks, first)
}

#[inline(always)]
fn portable(chunks: &[[u8; CHUNK_BYTES]], first: u64) -> u64 {
    let sums = chunks.iter().zip(first..).map(|(chunk, index)| chunk_sum(chunk, index));
    sums.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_give_the_same() {
        let chunks: Vec<[u8; CHUNK_BYTES]> = (0..5u32)
            .map(|c| std::array::from_fn(|i| (i as u32 * 31 + c * 97).wrapping_mul(0x9e37_79b9) as u8))
            .collect();
        assert_eq!(sum_chunks(&chunks, 3), portable(&chunks, 3));
        assert_ne!(sum_chunks(&chunks, 3), sum_chunks(&chunks, 4));
    }
}
