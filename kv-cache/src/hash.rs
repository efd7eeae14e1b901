//! Hashes of a prompt's prefixes.
//!
//! A hash identifies *all* tokens up to its end, not only its last group, and does not depend on a storage format. It is 128 bits of keyed
//! BLAKE3 over a versioned, length-delimited record. The key comes from the model's fingerprint and the tenant's secret salt, so tenants
//! never share blocks and cannot guess each other's hashes.

use baton_types::{Digest, TokenId};
use std::fmt;

/// Tokens per hashed group: the smallest `block_tokens`, so that pools of every block size share hashes.
pub const HASH_TOKENS: usize = 16;

/// Version of the record below. Any change of what is hashed must change it, so that old and new hashes never match.
const RECORD_VERSION: u8 = 1;
const KEY_CONTEXT: &str = "baton 2026-11 prefix hash key";

/// The hash of one prefix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixHash(pub [u8; 16]);

impl fmt::Display for PrefixHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for PrefixHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrefixHash({self})")
    }
}

/// Hashes prompts of one tenant for one model.
#[derive(Clone)]
pub struct PrefixHasher {
    key: [u8; 32],
    root: PrefixHash,
}

impl PrefixHasher {
    /// A hasher rooted in the model's fingerprint and the tenant's salt.
    pub fn new(model: &Digest, tenant_salt: &[u8]) -> Self {
        let mut material = Vec::with_capacity(40 + tenant_salt.len());
        material.extend_from_slice(&model.0);
        push_delimited(&mut material, tenant_salt);
        let key = blake3::derive_key(KEY_CONTEXT, &material);
        let root = truncate(blake3::keyed_hash(&key, &[RECORD_VERSION]));
        Self { key, root }
    }

    /// The parent of every first group.
    pub fn root(&self) -> PrefixHash {
        self.root
    }

    /// The hash of `parent` followed by `tokens`. `extra` distinguishes equal tokens with different meaning (adapter, digest of an image).
    pub fn next(&self, parent: PrefixHash, tokens: &[TokenId; HASH_TOKENS], extra: &[&[u8]]) -> PrefixHash {
        self.hash(parent, tokens, extra)
    }

    fn hash(&self, parent: PrefixHash, tokens: &[TokenId], extra: &[&[u8]]) -> PrefixHash {
        let mut record = Vec::with_capacity(32 + 4 * HASH_TOKENS);
        record.push(RECORD_VERSION);
        record.extend_from_slice(&parent.0);
        record.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
        tokens.iter().for_each(|t| record.extend_from_slice(&t.to_le_bytes()));
        record.extend_from_slice(&(extra.len() as u32).to_le_bytes());
        extra.iter().for_each(|e| push_delimited(&mut record, e));
        truncate(blake3::keyed_hash(&self.key, &record))
    }

    /// The hashes of every whole group of `tokens`, shortest prefix first; an incomplete last group has no hash. `extra` applies to all
    /// groups.
    pub fn prompt(&self, tokens: &[TokenId], extra: &[&[u8]]) -> Vec<PrefixHash> {
        let (groups, _tail) = tokens.as_chunks::<HASH_TOKENS>();
        let extend = |parent: &mut PrefixHash, group: &[TokenId; HASH_TOKENS]| {
            *parent = self.next(*parent, group, extra);
            Some(*parent)
        };
        groups.iter().scan(self.root, extend).collect()
    }

    /// The hash of all of `tokens`, including an incomplete last group. It never equals a prefix hash: equal hashes mean equal tokens.
    /// `hashes` are those that [`PrefixHasher::prompt`] returned for `tokens`, or for more tokens that begin with them.
    ///
    /// # Panics
    /// If there are fewer hashes than whole groups.
    pub fn whole(&self, hashes: &[PrefixHash], tokens: &[TokenId], extra: &[&[u8]]) -> PrefixHash {
        let (groups, tail) = tokens.as_chunks::<HASH_TOKENS>();
        self.hash(hashes[..groups.len()].last().copied().unwrap_or(self.root), tail, extra)
    }
}

impl fmt::Debug for PrefixHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is secret: it would let anyone compute a tenant's hashes.
        f.debug_struct("PrefixHasher").finish_non_exhaustive()
    }
}

fn push_delimited(record: &mut Vec<u8>, bytes: &[u8]) {
    record.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    record.extend_from_slice(bytes);
}

fn truncate(hash: blake3::Hash) -> PrefixHash {
    let mut out = [0; 16];
    out.copy_from_slice(&hash.as_bytes()[..16]);
    PrefixHash(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hasher(model: u8, salt: &[u8]) -> PrefixHasher {
        PrefixHasher::new(&Digest([model; 32]), salt)
    }

    #[test]
    fn names_are_pinned() {
        // Caches and routers of different releases exchange hashes: a change here needs a new RECORD_VERSION.
        let hashes = hasher(1, b"salt").prompt(&(0..40).collect::<Vec<_>>(), &[b"adapter"]);
        expect_test::expect![[r#"
            [
                PrefixHash(e422f61d877010d83f780cb7942dcb84),
                PrefixHash(679a11c506e69b8b8050a02ea15a870d),
            ]
        "#]]
        .assert_debug_eq(&hashes);
    }

    #[test]
    fn a_name_stands_for_the_whole_prefix() {
        let hasher = hasher(1, b"");
        let (a, mut b): (Vec<u32>, Vec<u32>) = ((0..64).collect(), (0..64).collect());
        assert_eq!(hasher.prompt(&a, &[]).len(), 4);
        assert_eq!(hasher.prompt(&a[..63], &[]), hasher.prompt(&a, &[])[..3]);
        b[17] = 99;
        let (a, b) = (hasher.prompt(&a, &[]), hasher.prompt(&b, &[]));
        assert_eq!(a[0], b[0]);
        assert!((1..4).all(|i| a[i] != b[i]), "a difference in group 1 reaches every later hash");
    }

    #[test]
    fn a_whole_prompt_has_a_name_of_its_own() {
        let (hasher, tokens) = (hasher(1, b""), (0..33).collect::<Vec<u32>>());
        let whole = |tokens: &[u32]| hasher.whole(&hasher.prompt(tokens, &[]), tokens, &[]);
        assert_eq!(whole(&tokens), whole(&tokens.clone()));
        let mut hashes: Vec<_> = (0..=33).map(|n| whole(&tokens[..n])).chain(hasher.prompt(&tokens, &[])).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 34 + 2);
    }

    #[test]
    fn model_tenant_and_extra_keys_separate() {
        let tokens: Vec<u32> = (0..16).collect();
        let mut hashes = vec![
            hasher(1, b"a").prompt(&tokens, &[])[0],
            hasher(2, b"a").prompt(&tokens, &[])[0],
            hasher(1, b"b").prompt(&tokens, &[])[0],
            hasher(1, b"a").prompt(&tokens, &[b""])[0],
            hasher(1, b"a").prompt(&tokens, &[b"xy"])[0],
            hasher(1, b"a").prompt(&tokens, &[b"x", b"y"])[0],
            hasher(1, b"a").root(),
        ];
        let n = hashes.len();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), n);
    }
}
