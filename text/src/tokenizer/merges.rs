//! Byte-pair encoding of words, on their bytes (Sennrich et al., 2016, arXiv 1508.07909, algorithm 1). Of all adjacent
//! pairs, the one with the lowest rank is merged first, until the model has no merge for any pair.

use baton_types::TokenId;
use serde_json::value::RawValue;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use tokenizers::models::bpe::BPE;
use tokenizers::tokenizer::Model;

use super::bytes;
use super::vocab::Vocab;

/// The merges of a byte-level model. The result equals that of the tokenizers crate's `BPE` for the same word in the
/// byte alphabet.
pub(super) struct Merges {
    /// Token of each byte. A byte without one adds nothing to a word.
    bytes: [Option<TokenId>; 256],
    /// By pair: the rank of its merge (the lowest comes first), and the token that it makes.
    pairs: HashMap<u64, (u32, TokenId), BuildHasherDefault<PairHasher>>,
    /// Tokens that a word with exactly their bytes becomes, as a table with open addressing: at most half full,
    /// [`NONE`] in free slots.
    words: Box<[TokenId]>,
}

/// Scratch memory, reused from word to word: 20 bytes per byte of the longest word, and seldom more while its pairs are
/// merged.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    /// Rank, and position of the left symbol, of pairs that are or were adjacent.
    pairs: BinaryHeap<Reverse<(u32, u32)>>,
}

#[derive(Clone, Copy)]
struct Symbol {
    /// [`NONE`] if it was merged into a symbol before it.
    id: TokenId,
    before: u32,
    after: u32,
}

/// No token: vocabularies are not that large.
const NONE: TokenId = TokenId::MAX;
/// No symbol: words are not that long.
const END: u32 = u32::MAX;

impl Merges {
    /// A feature of the model besides merging bytes is returned as the error.
    pub(super) fn new(model: &BPE, merges: &RawValue, vocab: &Vocab) -> Result<Self, String> {
        let marks = |mark: &Option<String>| mark.as_deref().is_some_and(|mark| !mark.is_empty());
        if model.dropout.is_some_and(|p| p != 0.0) {
            return Err("its model leaves out merges at random".to_owned());
        }
        if marks(&model.continuing_subword_prefix) || marks(&model.end_of_word_suffix) {
            return Err("its model marks where words begin or end".to_owned());
        }
        let id = |token: &str| model.token_to_id(token).filter(|&id| id != NONE);
        let bytes = std::array::from_fn(|byte| id(bytes::char(byte as u8).encode_utf8(&mut [0; 2])));
        if bytes.contains(&None) && (model.unk_token.is_some() || model.byte_fallback) {
            return Err("its model has a token for bytes that it lacks".to_owned());
        }
        let mut pairs = HashMap::default();
        for (rank, (left, right)) in read(merges)?.into_iter().enumerate() {
            let token =
                |token: &str| id(token).ok_or_else(|| format!("its merges name {token:?}, which is not a token"));
            let made = token(&format!("{left}{right}"))?;
            pairs.insert(key(token(&left)?, token(&right)?), (rank as u32, made));
        }
        let words = vec![NONE; (2 * vocab.size()).next_power_of_two()].into();
        let mut this = Self { bytes, pairs, words };
        let (mut scratch, mut ids) = (Scratch::default(), Vec::new());
        for id in 0..vocab.size() as TokenId {
            let Some(word) = model.id_to_token(id).and_then(|token| bytes::word(&token)) else { continue };
            ids.clear();
            this.merge(&word, &mut scratch, &mut ids);
            if (ids == [id] || model.ignore_merges) && vocab.bytes(id) == Some(&word) {
                let slot = this.slot(&word, vocab);
                this.words[slot] = id;
            }
        }
        Ok(this)
    }

    /// Appends the tokens of one word. `vocab` must be the one that these merges were made with.
    pub(super) fn encode(&self, word: &[u8], vocab: &Vocab, scratch: &mut Scratch, ids: &mut Vec<TokenId>) {
        match self.words[self.slot(word, vocab)] {
            NONE => self.merge(word, scratch, ids),
            id => ids.push(id),
        }
    }

    /// The slot of this word in the table of words, occupied or free.
    fn slot(&self, word: &[u8], vocab: &Vocab) -> usize {
        let mut hash = word.len() as u64;
        for chunk in word.chunks(8) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            hash = mix(hash ^ u64::from_le_bytes(bytes));
        }
        let mut slot = hash as usize;
        loop {
            slot &= self.words.len() - 1;
            let id = self.words[slot];
            if id == NONE || vocab.bytes(id) == Some(word) {
                return slot;
            }
            slot += 1;
        }
    }

    /// Merges the pair of lowest rank, or the first of equal ones, until no pair can be merged.
    fn merge(&self, word: &[u8], scratch: &mut Scratch, ids: &mut Vec<TokenId>) {
        let Scratch { symbols, pairs } = scratch;
        symbols.clear();
        pairs.clear();
        // Reserved exactly, not doubled: a whole text may be one word.
        symbols.reserve_exact(word.len());
        pairs.reserve_exact(word.len());
        for id in word.iter().filter_map(|&b| self.bytes[usize::from(b)]) {
            let at = symbols.len() as u32;
            symbols.push(Symbol { id, before: at.checked_sub(1).unwrap_or(END), after: at + 1 });
        }
        let Some(last) = symbols.last_mut() else { return };
        last.after = END;
        let rank = |left, right| self.pairs.get(&key(left, right)).copied();
        let neighbours = symbols.windows(2).enumerate();
        pairs.extend(neighbours.filter_map(|(at, s)| Some(Reverse((rank(s[0].id, s[1].id)?.0, at as u32)))));
        while let Some(Reverse((ranked, at))) = pairs.pop() {
            let Symbol { id, before, after } = symbols[at as usize];
            if id == NONE || after == END {
                continue;
            }
            // An outdated pair: the pair at its position now has another rank.
            let right = symbols[after as usize];
            let Some((_, made)) = rank(id, right.id).filter(|&(now, _)| now == ranked) else { continue };
            symbols[at as usize] = Symbol { id: made, before, after: right.after };
            symbols[after as usize].id = NONE;
            if before != END
                && let Some((ranked, _)) = rank(symbols[before as usize].id, made)
            {
                pairs.push(Reverse((ranked, before)));
            }
            if right.after != END {
                symbols[right.after as usize].before = at;
                if let Some((ranked, _)) = rank(made, symbols[right.after as usize].id) {
                    pairs.push(Reverse((ranked, at)));
                }
            }
        }
        ids.extend(symbols.iter().map(|s| s.id).filter(|&id| id != NONE));
    }
}

fn key(left: TokenId, right: TokenId) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Spreads a number over all bits. Both tables hold only data of the model's files, so the hash needs no secret key.
fn mix(number: u64) -> u64 {
    let product = u128::from(number ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
    product as u64 ^ (product >> 64) as u64
}

#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn write_u64(&mut self, pair: u64) {
        self.0 = mix(pair);
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("pairs are hashed as one number");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The merges of a `tokenizer.json`, in either notation.
fn read(json: &RawValue) -> Result<Vec<(String, String)>, String> {
    if let Ok(pairs) = serde_json::from_str(json.get()) {
        return Ok(pairs);
    }
    let broken = || "its merges are neither pairs nor lines of two words".to_owned();
    let lines: Vec<String> = serde_json::from_str(json.get()).map_err(|_| broken())?;
    let pair = |line: &String| {
        let (left, right) = line.split_once(' ').ok_or_else(broken)?;
        Ok((left.to_owned(), right.to_owned()))
    };
    lines.iter().filter(|line| !line.starts_with("#version")).map(pair).collect()
}
