//! The shipped engine over the stand-in model, turned in the process of its worker.

use crate::counts::Counting;
use crate::executor::{Executor, Process, Time, ms};
use crate::model::{Memory, VOCAB};
use baton_engine::{
    Driven, Engine, EngineConfig, EngineError, EngineHandle, Logits, ModelError, StepInput, StepModel, Turn,
};
use baton_kernels::device::DeviceError;
use baton_kv_cache::ForkCopy;
use baton_types::{Fence, FencePoll, FenceStatus, KvPoolMap};
use parking_lot::Mutex;
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

/// When the device computes what was launched, and what came of it.
struct DeviceStep {
    batch: StepInput,
    /// All logits, once it is computed.
    logits: Mutex<Option<Vec<f32>>>,
    fails: bool,
    computed: AtomicBool,
}

impl DeviceStep {
    /// Computes the step, once: whoever waits for it first has it computed.
    fn compute(&self, memory: &Memory) {
        if self.computed.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut first = 0;
        let mut rows = Vec::with_capacity(self.batch.ids.len());
        for segment in &self.batch.segments {
            for row in 0..segment.rows {
                memory.compute(&segment.blocks, segment.position + row, self.batch.ids[first + row]);
                rows.push((segment, segment.position + row + 1));
            }
            first += segment.rows;
        }
        let wanted = self.batch.logit_rows.iter().map(|row| rows[*row]);
        let logits = wanted.flat_map(|(segment, len)| memory.logits(&segment.blocks, len)).collect();
        *self.logits.lock() = Some(logits);
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
    step: Option<Arc<DeviceStep>>,
    /// When the step is over.
    over_at: Arc<Mutex<Time>>,
}

impl StepModel for OnDevice {
    fn vocab(&self) -> usize {
        VOCAB as usize
    }

    fn launch(&mut self, batch: &StepInput, observer: &mut dyn FnMut(u32, &Fence)) -> Result<(), ModelError> {
        let batch = StepInput {
            ids: batch.ids.clone(),
            segments: batch.segments.clone(),
            logit_rows: batch.logit_rows.clone(),
        };
        let fails = self.device.fails.swap(false, Ordering::Relaxed);
        let step = Arc::new(DeviceStep { batch, logits: Mutex::default(), fails, computed: AtomicBool::new(false) });
        let (shortest, longest) = STEP;
        let mut at = self.executor.time() + self.executor.draw(|random| random.between(shortest, longest)) / 2;
        let (computed, memory) = (step.clone(), self.memory.clone());
        self.executor.call(at, self.process, move || computed.compute(&memory));
        for layer in 0..crate::model::layers() {
            at += 1 + self.executor.draw(|random| random.below(shortest));
            let fence = Arc::new(LayerFence { step: step.clone(), is_over: AtomicBool::new(false) });
            observer(layer, &(fence.clone() as Fence));
            self.executor.call(at, self.process, move || fence.is_over.store(true, Ordering::Relaxed));
        }
        *self.over_at.lock() = at;
        self.step = Some(step);
        Ok(())
    }

    fn finish(&mut self) -> Result<Logits, ModelError> {
        let step = self.step.take().expect("a step was launched");
        step.compute(&self.memory);
        let logits = step.logits.lock().take();
        match logits {
            Some(logits) if !step.fails => Ok(Logits::new(VOCAB as usize, logits)),
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

/// A stand-in for a model on its device, which says when the step is over that was launched last.
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
    pub(super) fn new(executor: &Executor, process: Process, memory: &Memory, device: &Device) -> Self {
        let (memory, executor, device) = (memory.clone(), executor.clone(), device.clone());
        Self { memory, executor, process, device, step: None, over_at: Arc::default() }
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
