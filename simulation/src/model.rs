//! A stand-in for the model: what it keeps of the past is a chain of hashes in KV blocks, and what may come next is a hash of all of it
//! *as read from there*. One wrong, stale or missing byte gives other tokens than the [`Oracle`], which never sees a block.
//!
//! With a layer of states beside, a state is computed from the one before by the same hash as the first lane's KV. So it is right if it equals
//! the KV of the last position, and the answers of both models are the same.

use baton_kernels::sampling::{self, Sampled};
use baton_memory::HostPool;
use baton_types::{
    BlockId, BlockTables, Dtype, GroupKind, KvGroup, KvLayout, KvPlane, KvPoolMap, SamplingParams, TokenId,
};
use std::sync::Arc;

const LAYERS: usize = 2;
const PLANES: usize = 2;
const LANES: usize = LAYERS * PLANES;
/// Of one token in one plane: two words.
const TOKEN_BYTES: usize = 16;
/// Tokens of the vocabulary.
pub const VOCAB: u32 = 257;
/// The likelier one of two tokens is one of so many, so that answers repeat themselves and penalties count.
const FAMILIAR: u32 = 32;
/// Token ids below this end a sequence.
const END_TOKENS: u32 = 8;

/// Layout of the stand-in's KV.
pub fn layout(block_tokens: u32) -> KvLayout {
    let layout = KvLayout::llama(block_tokens, LAYERS as u32, 1, (TOKEN_BYTES / 2) as u32, Dtype::Bf16);
    layout.expect("two layers of one head")
}

/// The same with a layer of states.
pub fn layout_with_states(block_tokens: u32) -> KvLayout {
    let mut groups = layout(block_tokens).groups().to_vec();
    let plane = KvPlane::try_new("state", 1, (TOKEN_BYTES / 4) as u32, Dtype::F32).expect("a small plane");
    groups.push(KvGroup { kind: GroupKind::State, layers: vec![LAYERS as u32], planes: vec![plane] });
    KvLayout::try_new(block_tokens, groups).expect("three layers")
}

/// Tokens that end a sequence.
pub fn end_tokens() -> Vec<TokenId> {
    (0..END_TOKENS).collect()
}

/// Whether a sequence ends with this token.
pub const fn is_end(token: TokenId) -> bool {
    token < END_TOKENS
}

/// Finalizer of SplitMix64.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// KV of one token: a function of the token, its position and the KV before it.
fn words(lane: usize, token: TokenId, position: usize, before: u64) -> [u64; 2] {
    let first = mix(before ^ mix(u64::from(token) << 8 | lane as u64) ^ position as u64);
    [first, mix(first.wrapping_add(0x9e37_79b9_7f4a_7c15))]
}

fn fold(all: u64, [first, second]: [u64; 2]) -> u64 {
    mix(all ^ first).wrapping_add(second)
}

/// Two tokens may come next, one a little likelier: samples of one prompt go different ways.
fn logits_of(folds: [u64; LANES]) -> Vec<f32> {
    let hash = folds.into_iter().fold(0, |all, fold| mix(all ^ fold));
    let mut logits = vec![-1e9; VOCAB as usize];
    logits[(hash >> 32) as usize % VOCAB as usize] = 1.0;
    logits[(hash as u32 % FAMILIAR * END_TOKENS) as usize] = 1.5;
    logits
}

/// The right answer, computed without any block.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    before: [u64; LANES],
    folds: [u64; LANES],
    tokens: Vec<TokenId>,
}

impl Oracle {
    /// Behind these tokens.
    pub fn of(tokens: &[TokenId]) -> Self {
        let mut oracle = Self::default();
        tokens.iter().for_each(|&token| oracle.push(token));
        oracle
    }

    fn push(&mut self, token: TokenId) {
        for lane in 0..LANES {
            let words = words(lane, token, self.tokens.len(), self.before[lane]);
            (self.before[lane], self.folds[lane]) = (words[0], fold(self.folds[lane], words));
        }
        self.tokens.push(token);
    }

    /// All tokens of the answer of one sample, with their log-probabilities where asked for.
    pub fn answer(mut self, params: &SamplingParams, sample: u32) -> Vec<Sampled> {
        let mut answer = Vec::new();
        let mut history = sampling::History::rebuild(&self.tokens, self.tokens.len());
        while answer.len() < params.max_tokens as usize {
            let position = self.tokens.len() as u64;
            let sampled = sampling::sample(params, &logits_of(self.folds), &history, position, sample);
            let sampled = sampled.expect("two finite logits");
            let token = sampled.token;
            answer.push(sampled);
            if is_end(token) && !params.ignore_eos {
                break;
            }
            history.push(token);
            self.push(token);
        }
        answer
    }
}

/// One worker's memory, and how the stand-in reads and writes it.
#[derive(Clone, Debug)]
pub struct Memory {
    pub region: Arc<HostPool>,
    pub map: KvPoolMap,
}

impl Memory {
    /// A pool of so many blocks.
    pub fn new(block_tokens: u32, blocks: u32) -> Self {
        Self::of(KvPoolMap::try_new(layout(block_tokens), blocks).expect("a small pool"))
    }

    /// A pool that is laid out so. Its pages are taken from the system when they are first touched.
    pub fn of(map: KvPoolMap) -> Self {
        Self { region: HostPool::new(map.bytes()).expect("address space"), map }
    }

    /// The group, and the blocks of it, that hold these bytes of the region: no write concerns two groups.
    pub fn blocks_of(&self, range: std::ops::Range<usize>) -> (usize, impl Iterator<Item = BlockId> + use<'_>) {
        let layout = self.map.layout();
        let base = |group: usize| self.map.plane_offset(group, 0, BlockId(0), 0);
        let group = (0..layout.groups().len()).rev().find(|group| base(*group) <= range.start).unwrap_or(0);
        let block_bytes = layout.groups()[group].layer_block_bytes(layout.block_tokens());
        let (blocks, base) = (self.map.blocks(group) as usize, base(group));
        let at = (range.start - base) / block_bytes..(range.end - base).div_ceil(block_bytes);
        (group, at.map(move |at| BlockId((at % blocks) as u32)))
    }

    /// Whether the model has states.
    pub fn has_states(&self) -> bool {
        self.map.layout().groups().len() > 1
    }

    /// The state in a block.
    pub fn state(&self, block: BlockId) -> [u64; 2] {
        self.read(self.map.plane_offset(1, 0, block, 0))
    }

    /// Stores a state.
    pub fn set_state(&self, block: BlockId, state: [u64; 2]) {
        let bytes: Vec<u8> = state.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.region.copy_in(self.map.plane_offset(1, 0, block, 0), &bytes);
    }

    /// The state behind one more token at `position`.
    pub fn next_state(before: [u64; 2], position: usize, token: TokenId) -> [u64; 2] {
        words(0, token, position, before[0])
    }

    fn at(&self, lane: usize, blocks: &[BlockId], position: usize) -> usize {
        let size = self.map.layout().block_tokens();
        let within = position as u32 % size;
        let block = blocks[position / size as usize];
        self.map.token_range(0, lane / PLANES, block, lane % PLANES, within..within + 1).start
    }

    fn read(&self, offset: usize) -> [u64; 2] {
        let mut bytes = [0; TOKEN_BYTES];
        self.region.copy_out(offset, &mut bytes);
        let (first, second) = bytes.split_at(8);
        [first, second].map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
    }

    /// Computes the KV of one position from the one before it, as it stands in the blocks.
    pub fn compute(&self, blocks: &[BlockId], position: usize, token: TokenId) {
        for lane in 0..LANES {
            let before = if position == 0 { 0 } else { self.read(self.at(lane, blocks, position - 1))[0] };
            let [first, second] = words(lane, token, position, before).map(u64::to_le_bytes);
            let mut bytes = [0; TOKEN_BYTES];
            bytes[..8].copy_from_slice(&first);
            bytes[8..].copy_from_slice(&second);
            self.region.copy_in(self.at(lane, blocks, position), &bytes);
        }
    }

    /// Logits behind the first `len` positions, and the state there, where the model has one.
    pub fn logits(&self, blocks: &[BlockId], len: usize, state: Option<[u64; 2]>) -> Vec<f32> {
        let mut folds = [0; LANES];
        for (lane, all) in folds.iter_mut().enumerate() {
            *all = (0..len).fold(0, |all, position| fold(all, self.read(self.at(lane, blocks, position))));
        }
        if let Some([first, second]) = state {
            let right = self.read(self.at(0, blocks, len - 1));
            folds[0] ^= mix(mix(first ^ right[0]) ^ second ^ right[1]); // Nothing, if both are right.
        }
        logits_of(folds)
    }

    /// Copies the first `tokens` positions of one block into another.
    pub fn copy(&self, from: BlockId, to: BlockId, tokens: usize) {
        for lane in 0..LANES {
            for position in 0..tokens {
                let mut bytes = [0; TOKEN_BYTES];
                self.region.copy_out(self.at(lane, &[from], position), &mut bytes);
                self.region.copy_in(self.at(lane, &[to], position), &bytes);
            }
        }
    }

    /// The first position of `tokens` whose KV in these blocks is another, or the last one, if the state behind it is.
    pub fn wrong_in(&self, tables: &BlockTables, tokens: &[TokenId]) -> Option<usize> {
        let state = tables.0.get(1).and_then(|table| table.blocks.last());
        let is_wrong = |block: &&BlockId| {
            let right = tokens.iter().enumerate();
            let right = right.fold([0; 2], |state, (position, token)| Self::next_state(state, position, *token));
            !tokens.is_empty() && self.state(**block) != right
        };
        let wrong = || state.filter(is_wrong).map(|_| tokens.len() - 1);
        self.wrong(&tables.0[0].blocks, tokens).or_else(wrong)
    }

    /// The first position whose KV is not that of `tokens`.
    pub fn wrong(&self, blocks: &[BlockId], tokens: &[TokenId]) -> Option<usize> {
        let mut before = [0; LANES];
        tokens.iter().enumerate().position(|(position, &token)| {
            let mut is_wrong = false;
            for (lane, before) in before.iter_mut().enumerate() {
                let right = words(lane, token, position, *before);
                is_wrong |= self.read(self.at(lane, blocks, position)) != right;
                *before = right[0];
            }
            is_wrong
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_of_the_block_that_the_map_says() {
        let memory = Memory::new(32, 5);
        for block in (0..5).map(BlockId) {
            for (layer, plane) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let range = memory.map.token_range(0, layer, block, plane, 0..32);
                let (group, blocks) = memory.blocks_of(range);
                assert_eq!((group, blocks.collect::<Vec<_>>()), (0, vec![block]));
            }
        }
    }

    #[test]
    fn tokens_depend_on_the_state() {
        let memory = Memory::of(KvPoolMap::with_blocks(layout_with_states(16), vec![4, 3]).unwrap());
        let blocks = [3, 1, 0].map(BlockId);
        let tokens: Vec<TokenId> = (100..140).collect();
        let mut state = [0; 2];
        for (i, &token) in tokens.iter().enumerate() {
            memory.compute(&blocks, i, token);
            state = Memory::next_state(state, i, token);
        }
        memory.set_state(BlockId(2), state);
        let tables = BlockTables(vec![
            baton_types::BlockTable::from_start(blocks.to_vec()),
            baton_types::BlockTable { first: 2, blocks: vec![BlockId(2)] },
        ]);
        let right = logits_of(Oracle::of(&tokens).folds);
        assert_eq!((memory.state(BlockId(2)), memory.wrong_in(&tables, &tokens)), (state, None));
        assert_eq!(memory.logits(&blocks, 40, Some(state)), right);
        for word in 0..2 {
            let mut other = state;
            other[word] ^= 1 << 40;
            memory.set_state(BlockId(2), other);
            assert_eq!(memory.wrong_in(&tables, &tokens), Some(39));
            assert_ne!(memory.logits(&blocks, 40, Some(other)), right);
        }
        let (group, held) = memory.blocks_of(memory.map.token_range(1, 0, BlockId(2), 0, 0..1));
        assert_eq!((group, held.collect::<Vec<_>>()), (1, vec![BlockId(2)]));
    }

    #[test]
    fn tokens_depend_on_every_byte_of_the_past() {
        let memory = Memory::new(16, 4);
        let blocks = [3, 1, 0].map(BlockId);
        let tokens: Vec<TokenId> = (100..140).collect();
        tokens.iter().enumerate().for_each(|(i, &token)| memory.compute(&blocks, i, token));
        let right = logits_of(Oracle::of(&tokens).folds);
        assert_eq!((memory.logits(&blocks, 40, None), memory.wrong(&blocks, &tokens)), (right.clone(), None));
        for position in [0, 17, 39] {
            let at = memory.at(1, &blocks, position);
            let kept = memory.read(at);
            memory.region.copy_in(at, &[!(kept[0] as u8)]);
            assert_eq!(memory.wrong(&blocks, &tokens), Some(position));
            assert_ne!(memory.logits(&blocks, 40, None), right);
            memory.region.copy_in(at, &[kept[0] as u8]);
        }
    }
}
