//! The shipped engine over the stand-in model, turned in the process of its worker.

use crate::counts::Counting;
use crate::executor::{Executor, Process, Time, ms};
use crate::model::{Memory, VOCAB};
use baton_engine::{
    Driven, Engine, EngineConfig, EngineError, EngineHandle, ModelError, StepInput, StepModel, StepOutput, Turn,
};
use baton_kernels::device::{Bounds, DeviceError};
use baton_kernels::step::{GroupLimits, Launched, SlotSamplers, SlotTable, StepLimits, StepSegment};
use baton_kv_cache::ForkCopy;
use baton_types::{Fence, FencePoll, FenceStatus, KvPoolMap};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shortest and longest step.
const STEP: (Time, Time) = (ms(2), ms(10));

/// The device of a worker: fails with the next step once it is told to.
#[derive(Clone, Debug)]
pub struct Device {
    fails: Arc<AtomicBool>,
    counts: Counting,
}

impl Device {
    /// One that works.
    pub fn new(counts: Counting) -> Self {
        Self { fails: Arc::default(), counts }
    }

    /// No step fails any more.
    pub fn repair(&self) {
        self.fails.store(false, Ordering::Relaxed);
    }

    /// The next step fails.
    pub fn fail(&self) {
        self.fails.store(true, Ordering::Relaxed);
    }
}

/// What was launched, and what came of it.
struct DeviceStep {
    step: StepInput,
    segments: Vec<StepSegment>,
    /// The same with the tables of states, where the model has some.
    states: Vec<StepSegment>,
    /// Once it is computed.
    output: Mutex<Option<StepOutput>>,
    fails: bool,
    computed: AtomicBool,
    over_at: Time,
    /// The step before, if it was not finished when this one was launched: steps are computed in order.
    before: Mutex<Option<Arc<DeviceStep>>>,
}

impl DeviceStep {
    /// Computes the step, once: whoever waits for it first has it computed.
    fn compute(&self, memory: &Memory, samplers: &Mutex<SlotSamplers>) {
        if self.computed.swap(true, Ordering::Relaxed) {
            return;
        }
        let before = self.before.lock().take();
        before.into_iter().for_each(|before| before.compute(memory, samplers));
        let mut samplers = samplers.lock();
        let mut ids = Vec::new();
        samplers.begin(&self.step, &mut ids);
        let mut ids = ids.into_iter();
        let mut rows = Vec::with_capacity(self.step.ids.len());
        for (number, segment) in self.segments.iter().enumerate() {
            let states = self.states.get(number).map(|segment| &segment.table.blocks);
            let mut state = states.map(|blocks| if segment.position == 0 { [0; 2] } else { memory.state(blocks[0]) });
            for (row, id) in ids.by_ref().take(segment.rows).enumerate() {
                let position = segment.position + row;
                memory.compute(&segment.table.blocks, position, id);
                state = state.map(|state| Memory::next_state(state, position, id));
                rows.push((segment, position + 1, state));
            }
            if let Some((blocks, state)) = states.zip(state) {
                memory.set_state(*blocks.last().expect("a state to write"), state);
            }
        }
        let selected = self.step.selected_rows().into_iter().map(|row| rows[row]);
        let logits = selected.flat_map(|(segment, len, state)| memory.logits(&segment.table.blocks, len, state));
        let logits: Vec<f32> = logits.collect();
        *self.output.lock() = Some(samplers.sample(&self.step, &logits));
    }
}

/// Of one layer: done some time after the step was computed.
struct LayerFence {
    step: Arc<DeviceStep>,
    is_over: AtomicBool,
}

impl FencePoll for LayerFence {
    fn poll(&self) -> FenceStatus {
        match self.is_over.load(Ordering::Relaxed) {
            false => FenceStatus::Pending,
            true if self.step.fails => FenceStatus::Failed,
            true => FenceStatus::Done,
        }
    }
}

/// The stand-in model on its device.
pub(super) struct OnDevice {
    memory: Memory,
    executor: Executor,
    process: Process,
    device: Device,
    limits: StepLimits,
    table: SlotTable,
    samplers: Arc<Mutex<SlotSamplers>>,
    /// Launched and not finished, oldest first.
    steps: VecDeque<Arc<DeviceStep>>,
    /// When the oldest of them is over.
    over_at: Arc<Mutex<Time>>,
    /// Whether steps are launched ahead.
    is_asynchronous: bool,
}

impl StepModel for OnDevice {
    fn vocab(&self) -> usize {
        VOCAB as usize
    }

    fn is_asynchronous(&self) -> bool {
        self.is_asynchronous
    }

    fn launch(&mut self, step: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        let mut launched = Launched::default();
        self.table.launch(step, &self.limits, &mut launched)?;
        let mut groups = launched.segments.iter().map(|segments| segments.as_slice().to_vec());
        let (segments, states) = (groups.next().unwrap_or_default(), groups.next().unwrap_or_default());
        let fails = self.device.fails.swap(false, Ordering::Relaxed);
        let before = self.steps.back().cloned();
        let begins = before.as_ref().map_or(0, |before| before.over_at).max(self.executor.time());
        let (shortest, longest) = STEP;
        let computes_at = begins + self.executor.draw(|random| random.between(shortest, longest)) / 2;
        let mut at = computes_at;
        // The layers of a step take as long together, however many they are.
        let layers: Vec<(u32, Time)> = (0..self.limits.layers)
            .map(|layer| {
                at += 1 + self.executor.draw(|random| random.below(2 * shortest / Time::from(self.limits.layers)));
                (layer, at)
            })
            .collect();
        let step = Arc::new(DeviceStep {
            step: step.clone(),
            segments,
            states,
            output: Mutex::default(),
            fails,
            computed: AtomicBool::new(false),
            over_at: at,
            before: Mutex::new(before),
        });
        let (computed, memory, samplers) = (step.clone(), self.memory.clone(), self.samplers.clone());
        self.executor.call(computes_at, self.process, move || computed.compute(&memory, &samplers));
        for (layer, at) in layers.into_iter().filter(|(layer, _)| step.step.observed.contains(layer)) {
            let fence = Arc::new(LayerFence { step: step.clone(), is_over: AtomicBool::new(false) });
            observer(layer, &(fence.clone() as Fence));
            self.executor.call(at, self.process, move || fence.is_over.store(true, Ordering::Relaxed));
        }
        self.steps.push_back(step);
        self.note_over();
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, ModelError> {
        let step = self.steps.pop_front().expect("a step was launched");
        self.note_over();
        step.compute(&self.memory, &self.samplers);
        let output = step.output.lock().take();
        match output {
            Some(output) if !step.fails => {
                self.table.finish(&output);
                Ok(output)
            }
            _ => Err(DeviceError::Failed("the simulated device failed".into()).into()),
        }
    }

    fn copy(&mut self, copy: &ForkCopy) -> Result<(), ModelError> {
        self.device.counts.lock().add("engine: copies of shared blocks", 1);
        for (from, to) in copy.from.0[0].iter().zip(&copy.to.0[0]) {
            self.memory.copy(*from, *to, copy.tokens);
        }
        Ok(())
    }
}

/// A stand-in for a model on its device, which says when the oldest launched step is over.
pub trait TimedModel: StepModel {
    fn over_at(&self) -> Arc<Mutex<Time>>;
}

impl TimedModel for OnDevice {
    fn over_at(&self) -> Arc<Mutex<Time>> {
        self.over_at.clone()
    }
}

impl OnDevice {
    /// The stand-in model of a worker.
    pub(super) fn new(
        executor: &Executor,
        process: Process,
        memory: &Memory,
        device: &Device,
        config: &EngineConfig,
    ) -> Self {
        let (memory, executor, device) = (memory.clone(), executor.clone(), device.clone());
        let (slots_max, vocab, map) = (config.running_max, VOCAB as usize, &memory.map);
        let groups = map.layout().groups().iter().zip(map.group_blocks());
        let limits = StepLimits {
            bounds: Bounds {
                rows_max: config.step_rows_max(),
                logit_rows_max: config.logit_rows_max(),
                slots_max,
                positions_max: config.model_len_max,
                adapters: config.adapters,
            },
            vocab,
            layers: map.layout().groups().iter().map(|group| group.layers.len() as u32).sum(),
            block_tokens: map.layout().block_tokens() as usize,
            groups: groups.map(|(group, blocks)| GroupLimits { kind: group.kind, blocks: *blocks }).collect(),
        };
        let (table, samplers) = (SlotTable::new(slots_max), Arc::new(Mutex::new(SlotSamplers::new(slots_max, vocab))));
        let (steps, over_at) = (VecDeque::new(), Arc::default());
        let is_asynchronous = executor.draw(|random| random.below(2)) == 0;
        Self { memory, executor, process, device, limits, table, samplers, steps, over_at, is_asynchronous }
    }

    fn note_over(&self) {
        if let Some(oldest) = self.steps.front() {
            *self.over_at.lock() = oldest.over_at;
        }
    }
}

/// Starts the engine of a worker. `ended` is called where its device failed.
///
/// # Errors
/// As [`Engine::driven`], for a configuration that it refuses.
pub fn start<M: TimedModel>(
    executor: &Executor,
    process: Process,
    model: M,
    map: &KvPoolMap,
    config: EngineConfig,
    ended: impl FnOnce() + Send + 'static,
) -> Result<EngineHandle, EngineError> {
    let over_at = model.over_at();
    let (engine, driven) = Engine::driven(model, map, config, executor.runtime(process))?;
    executor.spawn(process, turns(executor.clone(), process, driven, over_at, ended));
    Ok(engine)
}

/// As the thread of an engine: turns it until its device fails.
async fn turns<M: TimedModel>(
    executor: Executor,
    process: Process,
    mut driven: Driven<M>,
    over_at: Arc<Mutex<Time>>,
    ended: impl FnOnce() + Send + 'static,
) {
    let runtime = executor.runtime(process);
    loop {
        match driven.turn() {
            Turn::Launched => {
                let over_at = *over_at.lock();
                runtime.sleep_until(executor.instant(over_at + 1)).await;
            }
            Turn::Idle { until } => {
                let due = async {
                    match until {
                        Some(until) => runtime.sleep_until(until).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    () = driven.work() => {}
                    () = due => {}
                }
            }
            Turn::Ended => return ended(),
        }
    }
}
