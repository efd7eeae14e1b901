//! The configuration of a simulated cluster. Schedules use devices that check their KV, and fleets use devices that only keep time.

use crate::executor::Time;
use crate::model;
use crate::network::{Delays, Lane};
use crate::rated;
use crate::rates::Rates;
use crate::worker::transfer::Tempo;
use baton_engine::EngineConfig;
use baton_kv_transfer::TransferLimits;
use baton_router::RouterConfig;
use baton_types::{GroupKind, KvLayout, Role};
use std::sync::Arc;
use std::time::Duration;

/// A cluster. Routers have the first slots, workers the following ones.
#[derive(Clone)]
pub struct ClusterPlan {
    pub routers: Vec<RouterPlan>,
    pub workers: Vec<WorkerPlan>,
    pub lane: Lane,
    /// Whether gets use one-sided reads, on lanes that support them.
    pub one_sided_gets: bool,
    /// Routers keep the leases themselves, without etcd.
    pub is_embedded: bool,
    pub delays: Delays,
    /// One-way delay of a call; the same as that of messages if absent.
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
    /// Blocks of its pool, in a group that keeps all positions.
    pub blocks: u32,
    /// And in one of states.
    pub states: u32,
    pub engine: EngineConfig,
    pub transfer: TransferLimits,
    pub tempo: Tempo,
    /// Longest timeout of a call.
    pub call_max: Duration,
    pub device: DevicePlan,
}

/// The simulated device and model.
#[derive(Clone)]
pub enum DevicePlan {
    /// Tokens are hashes of the KV as read from the blocks.
    Checked,
    /// Steps take their time, and KV has no content.
    Rated(Arc<Rates>),
}

impl ClusterPlan {
    /// Whether workers have devices whose KV is checked.
    pub(crate) fn is_checked(&self) -> bool {
        self.workers.iter().all(|worker| matches!(worker.device, DevicePlan::Checked))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.routers.len() + self.workers.len()
    }

    /// Name of the router or worker in a slot.
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
    /// Blocks of each group.
    pub(crate) fn group_blocks(&self) -> Vec<u32> {
        let of = |kind: GroupKind| if kind == GroupKind::State { self.states } else { self.blocks };
        self.layout.groups().iter().map(|group| of(group.kind)).collect()
    }

    /// Most claims of a decode worker.
    pub(crate) fn claims_max(&self) -> usize {
        self.engine.waiting_max
    }

    /// Size of the vocabulary in tokens.
    pub(crate) fn vocab(&self) -> u32 {
        match self.device {
            DevicePlan::Checked => model::VOCAB,
            DevicePlan::Rated(_) => rated::VOCAB,
        }
    }
}
