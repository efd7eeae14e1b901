//! A record of computed results: for each request and position the logits, and the KV of all tokens before it.

use super::world::{PATIENCE, index_of};
use baton_engine::LogitObserver;
use baton_memory::{PoolMemory, Rows};
use baton_types::{BlockTables, GroupKind, KvPoolMap, RequestId, TokenId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The inputs that decided one token.
#[derive(Clone, Debug)]
pub(super) struct Row {
    logits: Vec<f32>,
    /// A hash of the bytes of each (layer, token), layers outermost: independent of blocks.
    kv: Vec<u64>,
}

/// All rows of one run, by request and position. A sequence that moves is in one ledger, whichever engine computes it.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    rows: BTreeMap<(usize, usize), Row>,
    computed_twice: Option<(usize, usize)>,
    /// Tokens generated in this run.
    pub(super) outputs: Vec<Vec<TokenId>>,
}

/// Records what one engine computes in a ledger.
pub(super) struct Recorder {
    pub(super) ledger: Arc<Mutex<Ledger>>,
    pub(super) memory: Arc<dyn PoolMemory>,
    pub(super) map: KvPoolMap,
    /// The engine launches steps ahead, which may change a state before it is read here.
    pub(super) is_ahead: bool,
}

/// In place of the hash of a state that a later step may have changed.
const UNREAD: u64 = u64::MAX;

impl LogitObserver for Recorder {
    fn computed(&self, id: &RequestId, position: usize, blocks: &BlockTables, logits: &[f32]) {
        let kv = kv_hashes(&*self.memory, &self.map, blocks, position, !self.is_ahead);
        let row = Row { logits: logits.to_vec(), kv };
        let (key, mut ledger) = ((index_of(id), position), self.ledger.lock());
        if ledger.rows.insert(key, row).is_some() {
            ledger.computed_twice = Some(key);
        }
    }
}

/// Hashes of the KV of positions `0..tokens`, `[layers, tokens]`; 0 for those that the next position does not attend to. A state counts as the last
/// position's.
fn kv_hashes(
    memory: &dyn PoolMemory,
    map: &KvPoolMap,
    blocks: &BlockTables,
    tokens: usize,
    reads_states: bool,
) -> Vec<u64> {
    let deadline = Instant::now() + PATIENCE;
    let size = map.layout().block_tokens() as usize;
    let mut hashes = Vec::new();
    for (g, group) in map.layout().groups().iter().enumerate() {
        let planes = group.planes.len();
        if group.kind == GroupKind::State && !reads_states {
            hashes.extend(std::iter::repeat_n(UNREAD, group.layers.len() * tokens));
            continue;
        }
        // What left a window may be gone.
        let first = match group.kind {
            GroupKind::Window(window) => (tokens + 1).saturating_sub(window as usize),
            GroupKind::State => tokens.saturating_sub(1),
            _ => 0,
        };
        for layer in 0..group.layers.len() {
            // All reads of a layer run at the same time: each one takes long if the pool is remote.
            let read = |(block, plane): (usize, usize)| {
                let within = 0..group.rows(size.min(tokens - block * size)) as u32;
                let id = blocks.0[g].get(block).expect("what the next position attends to is held");
                let range = map.token_range(g, layer, id, plane, within);
                memory.read(Rows::run(range.start, range.len()), Vec::new())
            };
            let places =
                (first / size..tokens.div_ceil(size)).flat_map(|block| (0..planes).map(move |plane| (block, plane)));
            let reads: Vec<_> = places.map(read).collect();
            let bytes = reads.into_iter().map(|read| read.wait(deadline).expect("the pool's device works"));
            let bytes: Vec<Vec<u8>> = bytes.collect();
            for token in 0..tokens {
                if token < first {
                    hashes.push(0);
                    continue;
                }
                let mut hasher = DefaultHasher::new();
                for (plane, shape) in group.planes.iter().enumerate() {
                    let row = if group.kind.is_by_position() { token % size } else { 0 };
                    let at = row * shape.token_stride();
                    hasher.write(&bytes[(token / size - first / size) * planes + plane][at..at + shape.token_stride()]);
                }
                hashes.push(hasher.finish());
            }
        }
    }
    hashes
}

/// How many values were compared and equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Rows of logits.
    pub rows: usize,
    /// KV of one token in one layer, at one step.
    pub kv: usize,
}

/// The first difference of two runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference(String);

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Ledger {
    /// An empty ledger for this many requests.
    pub(super) fn new(requests: usize) -> Self {
        Self { outputs: vec![Vec::new(); requests], ..Self::default() }
    }

    /// Compares request `index` with the same request of `truth`. This ledger must hold each of `positions` and nothing else; `skipped`
    /// outputs were generated before.
    pub(super) fn compare(
        &self,
        truth: &Self,
        index: usize,
        positions: Range<usize>,
        skipped: usize,
    ) -> Result<Compared, Difference> {
        let differ = |what: String| Err(Difference(format!("request {index}: {what}")));
        if let Some((index, position)) = self.computed_twice {
            return Err(Difference(format!("request {index}, position {position} was drawn twice")));
        }
        let mut compared = Compared::default();
        for position in positions.clone() {
            let (Some(row), Some(want)) = (self.rows.get(&(index, position)), truth.rows.get(&(index, position)))
            else {
                return differ(format!("position {position} was never computed"));
            };
            // KV first: a difference in KV also causes one in the logits.
            if let Some((layer, token)) = row.kv_difference(want, position) {
                return differ(format!("at position {position}, KV of token {token} in layer {layer} differs"));
            }
            if let Some((token, got, want)) = row.logit_difference(want) {
                return differ(format!("at position {position}, the logit of token {token} is {got:e}, not {want:e}"));
            }
            compared.rows += 1;
            compared.kv += row.kv.len();
        }
        let extra = self.rows.range((index, 0)..(index + 1, 0)).find(|((_, at), _)| !positions.contains(at));
        if let Some(((_, at), _)) = extra {
            return differ(format!("position {at} was computed where {positions:?} was asked for"));
        }
        if self.outputs[index] != truth.outputs[index][skipped..] {
            return differ(format!("{:?} was generated, not {:?}", self.outputs[index], truth.outputs[index]));
        }
        Ok(compared)
    }

    /// Whether any logit is NaN: equal NaNs would prove nothing.
    pub(super) fn has_nan(&self) -> bool {
        self.rows.values().any(|row| row.logits.iter().any(|l| !l.is_finite()))
    }
}

impl Row {
    fn kv_difference(&self, want: &Self, tokens: usize) -> Option<(usize, usize)> {
        if self.kv.len() != want.kv.len() {
            return Some((0, self.kv.len().min(want.kv.len())));
        }
        let at = self.kv.iter().zip(&want.kv).position(|(a, b)| a != b && ![*a, *b].contains(&UNREAD))?;
        Some((at / tokens, at % tokens))
    }

    fn logit_difference(&self, want: &Self) -> Option<(usize, f32, f32)> {
        let at = self.logits.iter().zip(&want.logits).position(|(a, b)| a.to_bits() != b.to_bits())?;
        Some((at, self.logits[at], want.logits[at]))
    }
}
