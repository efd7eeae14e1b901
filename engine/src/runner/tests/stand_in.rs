//! A fake model: its KV is the tokens themselves, and its next token is a hash of all tokens read back.

use super::BLOCK;
use crate::model::{ModelError, StepInput, StepOutput};
use crate::step_model::StepModel;
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::device::Bounds;
use baton_kernels::step::{GroupLimits, Launched, RowId, SlotSamplers, SlotTable, StepLimits, StepSegment};
use baton_kv_cache::ForkCopy;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, Fence, GroupKind, TokenId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

pub(super) const VOCAB: usize = 997;
/// Two layers, so that their order is observable.
pub(super) const LAYERS: u32 = 2;

/// The memory of one pool: one token per position.
#[derive(Clone)]
pub(super) struct Kv(Arc<Mutex<Vec<TokenId>>>);

impl Kv {
    pub(super) fn new(blocks: u32) -> Self {
        // No prompt contains this value, so reads of unwritten positions are detected.
        Self(Arc::new(Mutex::new(vec![TokenId::MAX; blocks as usize * BLOCK])))
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
    /// What was launched and not finished, with the block tables of its segments.
    launched: VecDeque<(StepInput, Vec<StepSegment>)>,
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
        let blocks = (kv.0.lock().unwrap().len() / BLOCK) as u32;
        let groups = vec![GroupLimits { kind: GroupKind::Full, blocks }];
        let limits = StepLimits { bounds, vocab: VOCAB, layers: LAYERS, block_tokens: BLOCK, groups };
        let (table, samplers) = (SlotTable::new(SLOTS_MAX), SlotSamplers::new(SLOTS_MAX, VOCAB));
        Self { kv, hooks, limits, table, samplers, launched: VecDeque::new() }
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
        self.launched.push_back((step.clone(), segments));
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, ModelError> {
        if let Some(hook) = &mut self.hooks.before_finish {
            hook();
        }
        let (step, segments) = self.launched.pop_front().expect("a step was launched");
        let mut ids = Vec::new();
        self.samplers.begin(&step, &mut ids);
        let rows: Vec<_> = rows(&segments).collect();
        for ((id, token), (blocks, position)) in step.ids.iter().zip(ids).zip(&rows) {
            if *id == RowId::LastSampled {
                self.kv.store(blocks, *position, token);
            }
        }
        let logits = step.selected_rows().into_iter().flat_map(|row| {
            let (blocks, position) = rows[row];
            self.logits(&self.kv.load(blocks, position + 1))
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
