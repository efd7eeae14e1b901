//! A fake model: its KV is the tokens themselves, and its next token is a hash of all tokens read back.

use super::BLOCK;
use crate::model::{Logits, ModelError, StepInput};
use crate::step_model::StepModel;
use baton_kernels::step::StepSegment;
use baton_kv_cache::ForkCopy;
use baton_types::fence::AlreadyDone;
use baton_types::{BlockId, Fence, TokenId};
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

/// `n` tokens after `past`, one at a time.
pub(super) fn continuation(past: &[TokenId], n: usize) -> Vec<TokenId> {
    let mut tokens = past.to_vec();
    (0..n).for_each(|_| tokens.push(next_token(&tokens)));
    tokens.split_off(past.len())
}

pub(super) type Hook = Box<dyn FnMut(&StepInput) -> Result<(), ModelError> + Send>;

/// What a test does inside a step.
#[derive(Default)]
pub(super) struct Hooks {
    pub(super) before_step: Option<Hook>,
    /// A sequence with this token gets logits that are not numbers.
    pub(super) poison: Option<TokenId>,
}

pub(super) struct StandIn {
    kv: Kv,
    hooks: Hooks,
    /// What was launched, with the sequence and position of each row.
    launched: Option<(StepInput, Vec<(usize, usize)>)>,
}

impl StandIn {
    pub(super) fn new(kv: Kv, hooks: Hooks) -> Self {
        Self { kv, hooks, launched: None }
    }

    fn logits(&self, past: &[TokenId]) -> Vec<f32> {
        let mut logits = vec![0.0; VOCAB];
        logits[next_token(past) as usize] = 1.0;
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

    /// Stores at once and reads when the step is finished. This detects a block with two writers, and one that was released meanwhile.
    fn launch(&mut self, batch: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        if let Some(hook) = &mut self.hooks.before_step {
            hook(batch)?;
        }
        let mut owner = Vec::new();
        let mut first = 0;
        for (index, StepSegment { position, rows, blocks }) in batch.segments.iter().enumerate() {
            for row in 0..*rows {
                self.kv.store(blocks, position + row, batch.ids[first + row]);
                owner.push((index, position + row));
            }
            first += rows;
        }
        assert_eq!(owner.len(), batch.ids.len(), "segments own all rows");
        let fence: Fence = Arc::new(AlreadyDone);
        (0..LAYERS).for_each(|layer| observer(layer, &fence));
        self.launched = Some((batch.clone(), owner));
        Ok(())
    }

    fn finish(&mut self) -> Result<Logits, ModelError> {
        let (batch, owner) = self.launched.take().expect("a step was launched");
        let rows = batch.logit_rows.iter().flat_map(|&row| {
            let (segment, position) = owner[row];
            self.logits(&self.kv.load(&batch.segments[segment].blocks, position + 1))
        });
        Ok(Logits::new(VOCAB, rows.collect()))
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        self.kv.receive(&copy.to.0[0], &self.kv.load(&copy.from.0[0], copy.tokens));
        Ok(())
    }
}
