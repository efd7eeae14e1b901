//! A fake model: its KV is the tokens themselves, and its next token is a hash of all tokens read back. If it has states, a state is all
//! tokens that it has taken in.

use super::BLOCK;
use crate::model::{ModelError, StepInput, StepOutput};
use crate::step_model::StepModel;
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::device::Bounds;
use baton_kernels::step::{GroupLimits, Launched, RowId, SlotSamplers, SlotTable, StepLimits, StepSegment};
use baton_kv_cache::ForkCopy;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, BlockTables, Dtype, Fence, GroupKind, KvGroup, KvLayout, KvPlane, KvPoolMap, TokenId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

pub(super) const VOCAB: usize = 997;
/// Two layers, so that their order is observable.
pub(super) const LAYERS: u32 = 2;

/// The memory of one pool: one token per position, and states.
#[derive(Clone)]
pub(super) struct Kv(Arc<Mutex<Vec<TokenId>>>, Arc<Mutex<Vec<Vec<TokenId>>>>);

impl Kv {
    pub(super) fn new(blocks: u32) -> Self {
        Self::with_states(blocks, 0)
    }

    pub(super) fn with_states(blocks: u32, states: u32) -> Self {
        // No prompt contains this value, so reads of unwritten positions are detected.
        let (tokens, states) = (vec![TokenId::MAX; blocks as usize * BLOCK], vec![vec![TokenId::MAX]; states as usize]);
        Self(Arc::new(Mutex::new(tokens)), Arc::new(Mutex::new(states)))
    }

    /// Blocks of each group.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let (tokens, states) = (self.0.lock().unwrap().len(), self.1.lock().unwrap().len());
        [(tokens / BLOCK) as u32, states as u32].into_iter().filter(|blocks| *blocks > 0).collect()
    }

    /// The layout of this pool.
    pub(super) fn map(&self) -> KvPoolMap {
        let blocks = self.blocks();
        let group = |group: usize| {
            let (kind, rows) = if group == 0 { (GroupKind::Full, 1) } else { (GroupKind::State, 2) };
            let planes = vec![KvPlane::try_new("tokens", rows, 2, Dtype::F32).unwrap()];
            KvGroup { kind, layers: vec![group as u32], planes }
        };
        let layout = KvLayout::try_new(BLOCK as u32, (0..blocks.len()).map(group).collect()).unwrap();
        KvPoolMap::with_blocks(layout, blocks).unwrap()
    }

    fn set_state(&self, block: BlockId, tokens: Vec<TokenId>) {
        self.1.lock().unwrap()[block.0 as usize] = tokens;
    }

    pub(super) fn state(&self, block: BlockId) -> Vec<TokenId> {
        self.1.lock().unwrap()[block.0 as usize].clone()
    }

    /// Acts as a transfer of everything behind `cached` tokens, to the tables of a lease.
    pub(super) fn receive_all(&self, tables: &BlockTables, tokens: &[TokenId], cached: usize) {
        self.receive(&tables.0[0].blocks[cached / BLOCK..], &tokens[cached..]);
        if let Some(states) = tables.0.get(1) {
            assert_eq!(states.blocks.len(), 1, "a state is moved alone");
            self.set_state(states.blocks[0], tokens.to_vec());
        }
    }

    fn store(&self, blocks: &[BlockId], position: usize, token: TokenId) {
        self.0.lock().unwrap()[slot(blocks, position)] = token;
    }

    /// The first `len` positions of a table.
    pub(super) fn load(&self, blocks: &[BlockId], len: usize) -> Vec<TokenId> {
        let memory = self.0.lock().unwrap();
        (0..len).map(|position| memory[slot(blocks, position)]).collect()
    }

    /// Acts as a transfer: writes the positions of another pool's table here.
    pub(super) fn receive(&self, blocks: &[BlockId], tokens: &[TokenId]) {
        tokens.iter().enumerate().for_each(|(position, token)| self.store(blocks, position, *token));
    }
}

fn slot(blocks: &[BlockId], position: usize) -> usize {
    blocks[position / BLOCK].0 as usize * BLOCK + position % BLOCK
}

/// The token after `past` (FNV-1a).
pub(super) fn next_token(past: &[TokenId]) -> TokenId {
    let hash = past
        .iter()
        .flat_map(|t| t.to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash % VOCAB as u64) as TokenId
}

/// A token after `past` that mostly repeats what was there six tokens ago, and depends on all of it.
pub(super) fn repeating_token(past: &[TokenId]) -> TokenId {
    match next_token(past) {
        other if other % 8 == 0 => other,
        other => past.len().checked_sub(6).map_or(other, |at| past[at]),
    }
}

/// What a draft model says that is right but for every eighth token, if it has read all of `past`.
pub(super) fn mostly_next_token(past: &[TokenId]) -> TokenId {
    let next = next_token(past);
    if next.is_multiple_of(8) { (next + 1) % VOCAB as TokenId } else { next }
}

/// `n` tokens after `past`, one at a time.
pub(super) fn continuation(past: &[TokenId], n: usize) -> Vec<TokenId> {
    continuation_by(next_token, past, n)
}

/// The same for a model that repeats itself.
pub(super) fn repetition(past: &[TokenId], n: usize) -> Vec<TokenId> {
    continuation_by(repeating_token, past, n)
}

fn continuation_by(next: Next, past: &[TokenId], n: usize) -> Vec<TokenId> {
    let mut tokens = past.to_vec();
    (0..n).for_each(|_| tokens.push(next(&tokens)));
    tokens.split_off(past.len())
}

pub(super) type Hook = Box<dyn FnMut(&StepInput) -> Result<(), ModelError> + Send>;

/// What a test does inside a step.
#[derive(Default)]
pub(super) struct Hooks {
    pub(super) before_step: Option<Hook>,
    /// Called while the oldest step still runs.
    pub(super) before_finish: Option<Box<dyn FnMut() + Send>>,
    /// A sequence with this token gets logits that are not numbers.
    pub(super) poison: Option<TokenId>,
    /// Steps are launched ahead.
    pub(super) is_asynchronous: bool,
    /// The model's next token; `None` is [`next_token`].
    pub(super) next: Option<Next>,
}

/// The token after others.
pub(super) type Next = fn(&[TokenId]) -> TokenId;

/// As many as the largest running batch of a test.
const SLOTS_MAX: usize = 8;

pub(super) struct StandIn {
    kv: Kv,
    hooks: Hooks,
    limits: StepLimits,
    table: SlotTable,
    samplers: SlotSamplers,
    /// What was launched and not finished, with the block tables of its segments, and those of states.
    launched: VecDeque<(StepInput, Vec<StepSegment>, Vec<StepSegment>)>,
}

impl StandIn {
    pub(super) fn new(kv: Kv, hooks: Hooks) -> Self {
        let bounds = Bounds {
            rows_max: 64,
            logit_rows_max: 2 * SLOTS_MAX,
            slots_max: SLOTS_MAX,
            positions_max: 1024,
            adapters: AdapterBounds::default(),
        };
        let kinds = [GroupKind::Full, GroupKind::State];
        let groups = kinds.into_iter().zip(kv.blocks()).map(|(kind, blocks)| GroupLimits { kind, blocks }).collect();
        let limits = StepLimits { bounds, vocab: VOCAB, layers: LAYERS, block_tokens: BLOCK, groups };
        let (table, samplers) = (SlotTable::new(SLOTS_MAX), SlotSamplers::new(SLOTS_MAX, VOCAB));
        Self { kv, hooks, limits, table, samplers, launched: VecDeque::new() }
    }

    /// The state behind each row; that behind the last row of a segment is stored.
    fn take_in(&self, states: &[StepSegment], ids: &[TokenId]) -> Vec<Vec<TokenId>> {
        let mut behind = Vec::new();
        for segment in states {
            let blocks = &segment.table.blocks;
            let mut state = if segment.position == 0 { Vec::new() } else { self.kv.state(blocks[0]) };
            for _ in 0..segment.rows {
                state.push(ids[behind.len()]);
                behind.push(state.clone());
            }
            self.kv.set_state(*blocks.last().expect("a state to write"), state);
        }
        behind
    }

    fn logits(&self, past: &[TokenId]) -> Vec<f32> {
        let mut logits = vec![0.0; VOCAB];
        let next = self.hooks.next.unwrap_or(next_token)(past);
        logits[next as usize] = 1.0;
        if self.hooks.poison.is_some_and(|token| past.contains(&token)) {
            logits[7] = f32::NAN;
        }
        logits
    }
}

impl StepModel for StandIn {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn is_asynchronous(&self) -> bool {
        self.hooks.is_asynchronous
    }

    /// Stores at once what is known, and reads when the step is finished. This detects a block with two writers, and one that was released
    /// meanwhile.
    fn launch(&mut self, step: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        if let Some(hook) = &mut self.hooks.before_step {
            hook(step)?;
        }
        let mut launched = Launched::default();
        self.table.launch(step, &self.limits, &mut launched)?;
        let segments = launched.segments[0].as_slice().to_vec();
        for (id, (blocks, position)) in step.ids.iter().zip(rows(&segments)) {
            self.kv.store(blocks, position, if let RowId::Token(token) = id { *token } else { TokenId::MAX });
        }
        let fence: Fence = Arc::new(AlreadyDone);
        let layers = if step.observed.is_empty() { 0 } else { LAYERS };
        (0..layers).for_each(|layer| observer(layer, &fence));
        let states = launched.segments.get(1).map_or(Vec::new(), |states| states.as_slice().to_vec());
        for segment in states.iter().filter(|segment| segment.table.blocks.len() > 1) {
            self.kv.set_state(segment.table.blocks[1], vec![TokenId::MAX]);
        }
        self.launched.push_back((step.clone(), segments, states));
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, ModelError> {
        if let Some(hook) = &mut self.hooks.before_finish {
            hook();
        }
        let (step, segments, states) = self.launched.pop_front().expect("a step was launched");
        let mut ids = Vec::new();
        self.samplers.begin(&step, &mut ids);
        let rows: Vec<_> = rows(&segments).collect();
        for ((id, token), (blocks, position)) in step.ids.iter().zip(&ids).zip(&rows) {
            if *id == RowId::LastSampled {
                self.kv.store(blocks, *position, *token);
            }
        }
        let taken_in = self.take_in(&states, &ids);
        let logits = step.selected_rows().into_iter().flat_map(|row| {
            let (blocks, position) = rows[row];
            let past = self.kv.load(blocks, position + 1);
            match taken_in.get(row).is_none_or(|state| *state == past) {
                true => self.logits(&past),
                false => self.logits(&[]),
            }
        });
        let logits: Vec<f32> = logits.collect();
        let output = self.samplers.sample(&step, &logits);
        self.table.finish(&output);
        Ok(output)
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        self.kv.receive(&copy.to.0[0], &self.kv.load(&copy.from.0[0], copy.tokens));
        Ok(())
    }
}

/// Block table and position of each row.
fn rows(segments: &[StepSegment]) -> impl Iterator<Item = (&[BlockId], usize)> {
    segments.iter().flat_map(|segment| {
        (segment.position..segment.position + segment.rows).map(|position| (&segment.table.blocks[..], position))
    })
}
