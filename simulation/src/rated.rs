//! A simulated model whose steps take as long as a file of rates says. Its KV has no content, and each of its tokens can follow any
//! input.

use crate::executor::{Executor, Process, Time};
use crate::rates::Rates;
use crate::worker::engine::TimedModel;
use baton_engine::{ModelError, StepInput, StepModel, StepOutput};
use baton_kernels::step::SlotSamplers;
use baton_kv_cache::ForkCopy;
use baton_types::{Dtype, Fence, FencePoll, FenceStatus, KvLayout, Role};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::Notify;

/// Size of the vocabulary in tokens: small, because each generated token scans all logits.
pub(crate) const VOCAB: u32 = 64;

/// Layers: a step's KV is sent to the decode worker in this many parts, while the rest is computed.
pub(crate) const LAYERS: u32 = 4;

/// Layout of its KV. The KV is never read, so the layout is the smallest possible.
pub(crate) fn layout(block_tokens: u32) -> KvLayout {
    KvLayout::llama(block_tokens, LAYERS, 1, 1, Dtype::Bf16).expect("whole granules of tokens")
}

/// The model on its device.
pub(crate) struct Rated {
    executor: Executor,
    process: Process,
    role: Role,
    rates: Arc<Rates>,
    /// Wakes the transfer, which waits for fences.
    moved: Arc<Notify>,
    over_at: Arc<Mutex<Time>>,
    samplers: SlotSamplers,
    /// The running step.
    step: StepInput,
}

/// A fence that is done at a given time.
struct DoneAt {
    executor: Executor,
    at: Time,
}

impl FencePoll for DoneAt {
    fn poll(&self) -> FenceStatus {
        if self.executor.time() >= self.at { FenceStatus::Done } else { FenceStatus::Pending }
    }
}

impl Rated {
    pub(crate) fn new(
        executor: &Executor,
        process: Process,
        role: Role,
        rates: Arc<Rates>,
        moved: Arc<Notify>,
        slots_max: usize,
    ) -> Self {
        let samplers = SlotSamplers::new(slots_max, VOCAB as usize);
        let (executor, over_at, step) = (executor.clone(), Arc::default(), StepInput::default());
        Self { executor, process, role, rates, moved, over_at, samplers, step }
    }

    /// Seconds of a step: for decode, and for the prompt tokens computed with it.
    fn step_s(&self, batch: &StepInput) -> f64 {
        let (mut sequences, mut context, mut prompts_s) = (0, 0, 0.0);
        for segment in &batch.segments {
            let is_last_of_prompt = segment.samples > 0;
            let (from, to) = (segment.position as u64, (segment.position + segment.rows) as u64);
            if self.role == Role::Decode && segment.rows == 1 {
                sequences += 1;
                context += from;
            } else {
                prompts_s += self.rates.compute_s(from, to);
                prompts_s += if is_last_of_prompt { self.rates.prefill.prompt_s } else { 0.0 };
            }
        }
        self.rates.step_s(sequences, context) + prompts_s
    }
}

impl StepModel for Rated {
    fn vocab(&self) -> usize {
        VOCAB as usize
    }

    fn launch(&mut self, batch: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        let (now, took) = (self.executor.time(), (self.step_s(batch) * 1e6).round() as Time);
        for layer in batch.observed.clone() {
            let at = now + took * Time::from(layer + 1) / Time::from(LAYERS);
            observer(layer, &(Arc::new(DoneAt { executor: self.executor.clone(), at }) as Fence));
            // Only workers that prefill for others have transfers waiting for fences.
            if self.role == Role::Prefill {
                let moved = self.moved.clone();
                self.executor.call(at, self.process, move || moved.notify_one());
            }
        }
        *self.over_at.lock() = now + took;
        self.step = batch.clone();
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, ModelError> {
        self.samplers.begin(&self.step, &mut Vec::new());
        let rows = self.step.selected_rows().len();
        Ok(self.samplers.sample(&self.step, &vec![0.0; rows * VOCAB as usize]))
    }

    fn copy(&mut self, _: &ForkCopy) -> Result<(), ModelError> {
        Ok(())
    }
}

impl TimedModel for Rated {
    fn over_at(&self) -> Arc<Mutex<Time>> {
        self.over_at.clone()
    }
}
