//! What a simulated cluster is made of: filled by schedules, whose devices check their KV, and by fleets, whose devices keep time.

use crate::executor::Time;
use crate::model;
use crate::network::{Delays, Lane};
use crate::rated;
use crate::rates::Rates;
use crate::worker::transfer::Tempo;
use baton_engine::EngineConfig;
use baton_kv_transfer::TransferLimits;
use baton_router::RouterConfig;
use baton_types::{KvLayout, Role};
use std::sync::Arc;
use std::time::Duration;

/// A cluster. Routers have the first slots, workers those behind them.
#[derive(Clone)]
pub struct ClusterPlan {
    pub routers: Vec<RouterPlan>,
    pub workers: Vec<WorkerPlan>,
    pub lane: Lane,
    /// Whether workers read what they get by themselves, where the lane lets them.
    pub gets_by_itself: bool,
    /// Routers keep the leases themselves, without etcd.
    pub is_embedded: bool,
    pub delays: Delays,
    /// What a call takes each way; as long as messages where absent.
    pub half_trip: Option<Time>,
}

#[derive(Clone)]
pub struct RouterPlan {
    pub name: String,
    pub config: RouterConfig,
}

#[derive(Clone)]
pub struct WorkerPlan {
    pub name: String,
    pub role: Role,
    pub layout: KvLayout,
    /// Of its pool.
    pub blocks: u32,
    pub engine: EngineConfig,
    pub transfer: TransferLimits,
    pub tempo: Tempo,
    /// Longest call.
    pub call_max: Duration,
    pub device: DevicePlan,
}

/// What stands in for the device and its model.
#[derive(Clone)]
pub enum DevicePlan {
    /// Tokens are hashes of the KV as it is read from the blocks.
    Checked,
    /// Steps take their time, and KV has no content.
    Rated(Arc<Rates>),
}

impl ClusterPlan {
    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.routers.len() + self.workers.len()
    }

    /// Name of whatever has a slot.
    pub fn name(&self, slot: usize) -> &str {
        match self.routers.get(slot) {
            Some(router) => &router.name,
            None => &self.worker(slot).name,
        }
    }

    /// The worker of a slot.
    pub(crate) fn worker(&self, slot: usize) -> &WorkerPlan {
        &self.workers[slot - self.routers.len()]
    }
}

impl WorkerPlan {
    /// Claims of a decode worker.
    pub(crate) fn claims_max(&self) -> usize {
        self.engine.waiting_max
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocab(&self) -> u32 {
        match self.device {
            DevicePlan::Checked => model::VOCAB,
            DevicePlan::Rated(_) => rated::VOCAB,
        }
    }
}
