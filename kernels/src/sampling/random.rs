//! Counter-based random numbers: a pure function of (seed, sample, position), so that there is no state to carry or replay.

/// Separates these hashes from every other use of BLAKE3; its version changes with the mapping.
const CONTEXT: &[u8; 16] = b"baton.sample.v1\0";

/// A number in `[0, 1)`, uniform over the multiples of 2^-53: the upper 53 bits of the first eight bytes (little endian) of
/// `BLAKE3("baton.sample.v1\0" || seed: u64 LE || sample_index: u32 LE || position: u64 LE)`.
pub(crate) fn uniform(seed: u64, sample_index: u32, position: u64) -> f64 {
    let mut record = [0; 36];
    record[..16].copy_from_slice(CONTEXT);
    record[16..24].copy_from_slice(&seed.to_le_bytes());
    record[24..28].copy_from_slice(&sample_index.to_le_bytes());
    record[28..].copy_from_slice(&position.to_le_bytes());
    let hash = blake3::hash(&record);
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    (u64::from_le_bytes(word) >> 11) as f64 * (-53f64).exp2()
}
