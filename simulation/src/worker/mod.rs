//! One start of a worker: the shipped services, engine, pool and transfer, put together in one simulated process.

mod cached;
pub mod engine;
mod held;
pub mod transfer;
mod watched;

use crate::counts::Counting;
use crate::executor::{Executor, Process};
use crate::invariant::{Breaches, Invariant};
use crate::model::Memory;
use crate::network::{HeldBlocks, Network};
use crate::plan::{DevicePlan, WorkerPlan};
use crate::prompts::Prompts;
use crate::rated::Rated;
use baton_decode_worker::simulation::{DecodeRequest, DecodeService, Handoffs};
use baton_engine::EngineHandle;
use baton_kv_transfer::{KvTransfer, SinkHandler, TransferConfig, TransportChoice};
use baton_node::membership::Members;
use baton_prefill_worker::simulation::{NoSink, PrefillRequest, PrefillService};
use baton_types::{
    Compatibility, DecodeEvent, Digest, Dtype, Incarnation, InstanceId, InstanceRecord, KvPoolMap, ModelCard,
    NumericsClass, Party, PrefillEvent, ProtocolRange, RequestError, Role, Runtime, SamplingDefaults, Shard,
};
use baton_worker::call::CallContext;
use baton_worker::drain::Drain;
use baton_worker::phases::Phases;
use baton_worker::report::{Report, Wanted, cache_changes};
use baton_worker::role::Parts;
use baton_worker::service::{Claimed, WorkerService};
use baton_worker::spans::Parent;
use cached::Cached;
use engine::{Device, OnDevice};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
pub use watched::ServedOffer;
use watched::{Sources, Watched};

/// The model that all serve.
pub const MODEL: &str = "m";
/// Longest drain where none is stated.
const DRAIN_MAX: Duration = Duration::from_secs(2);

/// Where a worker starts, and what it is told.
#[allow(missing_docs)] // The types say it.
pub struct Place<'a> {
    pub executor: &'a Executor,
    pub network: &'a Network,
    pub plan: &'a WorkerPlan,
    pub breaches: &'a Breaches,
    pub counts: &'a Counting,
    pub prompts: &'a Prompts,
    pub slot: usize,
    pub process: Process,
    pub incarnation: u64,
    /// Who is registered, as it hears it.
    pub members: Members,
    /// Called when its engine ended because the device failed.
    pub ended: Box<dyn FnOnce() + Send>,
}

/// What a role adds.
#[derive(Clone)]
enum Serves {
    Prefill(PrefillService),
    Decode(DecodeService),
}

/// One start of a worker. Clones are the same one.
#[derive(Clone)]
pub struct SimulatedWorker {
    /// What it registers.
    pub record: Arc<InstanceRecord>,
    /// Its process.
    pub process: Process,
    /// Its pool's memory.
    pub memory: Memory,
    /// Its engine.
    pub engine: EngineHandle,
    /// Its data plane.
    pub transfer: KvTransfer,
    /// Its device.
    pub device: Device,
    /// Its way out.
    pub drain: Drain,
    /// Who is registered, as it hears it.
    pub members: Members,
    serves: Serves,
    service: WorkerService,
    parts: Parts,
    claims: Sources,
    _cached: Option<Arc<Cached>>,
    breaches: Breaches,
}

/// Where the data plane of a slot listens, in any start.
fn address(slot: usize) -> SocketAddr {
    (Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 1).to_bits() + slot as u32), 7000).into()
}

fn tracer() -> SdkTracer {
    SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOff).build().tracer("simulation")
}

impl SimulatedWorker {
    /// Starts a worker.
    pub fn start(place: Place<'_>) -> Self {
        let Place { executor, network, plan, breaches, counts, prompts, slot, process, incarnation, members, ended } =
            place;
        let runtime: Arc<dyn Runtime> = executor.runtime(process);
        let map = KvPoolMap::with_blocks(plan.layout.clone(), plan.group_blocks()).expect("an address space");
        let (memory, device, moved) = (Memory::of(map), Device::new(counts.clone()), Arc::new(Notify::new()));
        let engine = match &plan.device {
            DevicePlan::Checked => {
                let model = OnDevice::new(executor, process, &memory, &device, &plan.engine);
                engine::start(executor, process, model, &memory.map, plan.engine.clone(), ended)
            }
            DevicePlan::Rated(rates) => {
                let model =
                    Rated::new(executor, process, plan.role, rates.clone(), moved.clone(), plan.engine.running_max);
                engine::start(executor, process, model, &memory.map, plan.engine.clone(), ended)
            }
        };
        let engine = engine.expect("a sound configuration");
        let is_checked = matches!(plan.device, DevicePlan::Checked);
        let look = || Cached::look(engine.pool(), memory.clone(), prompts.clone(), breaches.clone());
        let cached = is_checked.then(look);
        let name = InstanceId::try_new(&plan.name).expect("a short name");
        let party = Party { instance: name, incarnation: Incarnation(incarnation) };
        let (handoffs, handler): (Option<Arc<Handoffs>>, Arc<dyn SinkHandler>) = if plan.role == Role::Decode {
            let handoffs = Handoffs::start(&engine, members.clone(), plan.claims_max(), runtime.clone());
            (Some(handoffs.clone()), handoffs)
        } else {
            (None, Arc::new(NoSink { engine: engine.clone(), members: members.clone() }))
        };
        let compatibility = Compatibility {
            model: Digest([1; 32]),
            layout: memory.map.layout().clone(),
            class: NumericsClass {
                order: "simulated".into(),
                weights: Dtype::Bf16.into(),
                kv: Dtype::Bf16,
                kernel_revision: 1,
            },
        };
        let class = compatibility.class.clone();
        let claimed = Sources::default();
        let transfer = {
            let choice = TransportChoice::tcp(address(slot).ip());
            let mut config = TransferConfig::new(party.clone(), compatibility, memory.map.clone(), choice);
            config.limits = plan.transfer.clone();
            let site = transfer::Site {
                executor: executor.clone(),
                network: network.clone(),
                process,
                address: address(slot),
                tempo: plan.tempo,
                moved,
            };
            let handler = Arc::new(Watched {
                handler,
                memory: is_checked.then(|| memory.clone()),
                claims: claimed.clone(),
                counts: counts.clone(),
                breaches: breaches.clone(),
            });
            let held: Arc<dyn HeldBlocks> = match is_checked {
                true => held::OfPool::new(engine.pool(), memory.clone()),
                false => Arc::new(held::Unchecked),
            };
            let started = transfer::start(site, config, memory.region.clone(), handler, held);
            started.expect("a sound configuration")
        };
        let drain = Drain::new(runtime.clone());
        let record = Arc::new(record(plan, party.clone(), class, &memory, &transfer));
        let claims = handoffs.clone();
        let service = WorkerService {
            party,
            record: InstanceRecord::clone(&record),
            engine: engine.clone(),
            transfer: transfer.clone(),
            bundle: None,
            claimed: Arc::new(move || claims.as_ref().map_or_else(Claimed::default, |handoffs| handoffs.claimed())),
            cache_changed: cache_changes(&engine.pool()),
            adapters: None,
            drain: drain.clone(),
            drain_max: DRAIN_MAX,
            stop: CancellationToken::new(),
            runtime: runtime.clone(),
        };
        let parts = Parts {
            engine: engine.clone(),
            transfer: transfer.clone(),
            drain: drain.clone(),
            tracer: tracer(),
            phases: Phases::register(&mut Default::default(), MODEL, "default"),
            call_max: plan.call_max,
            message_max: usize::MAX,
            model: record.card.fingerprint,
            adapters: None,
            runtime,
        };
        let serves = match handoffs {
            Some(handoffs) => Serves::Decode(DecodeService { handoffs, parts: parts.clone() }),
            None => Serves::Prefill(PrefillService { parts: parts.clone() }),
        };
        let breaches = breaches.clone();
        Self {
            record,
            process,
            memory,
            engine,
            transfer,
            device,
            drain,
            members,
            serves,
            service,
            parts,
            claims: claimed,
            _cached: cached,
            breaches,
        }
    }

    /// Which start of which worker it is.
    pub fn party(&self) -> &Party {
        &self.record.party
    }

    /// Whether it is a decode worker.
    pub fn decodes(&self) -> bool {
        matches!(self.serves, Serves::Decode(_))
    }

    /// What is claimed and not adopted.
    pub fn claimed(&self) -> Claimed {
        (self.service.claimed)()
    }

    /// KV that was adopted from others.
    pub fn granted(&self) -> Vec<ServedOffer> {
        self.claims.granted()
    }

    /// Whether it expects no KV, and nobody waits for its blocks.
    pub fn is_idle(&self) -> bool {
        match &self.serves {
            Serves::Decode(service) => service.handoffs.is_idle(),
            Serves::Prefill(_) => true,
        }
    }

    /// As a call that came just now for this start of it.
    fn take_up(&self, meant: &Party, deadline: Instant) -> Result<CallContext, RequestError> {
        self.parts.check_party(meant)?;
        if meant != self.party() {
            let what = format!("a call for {meant} is served by {}", self.party());
            self.breaches.add(Invariant::RightIncarnation, what);
        }
        let since = self.parts.runtime.now();
        let parent = Parent::of(&Default::default(), &self.parts.tracer);
        Ok(CallContext {
            since,
            deadline: deadline.min(since + self.parts.call_max),
            running: self.parts.drain.enter()?,
            parent,
        })
    }

    /// Decodes, as the service does that is called over gRPC.
    ///
    /// # Errors
    /// As the service.
    pub fn decode(
        &self,
        meant: &Party,
        deadline: Instant,
        request: DecodeRequest,
    ) -> Result<mpsc::Receiver<Result<DecodeEvent, RequestError>>, RequestError> {
        match &self.serves {
            Serves::Decode(service) => {
                let call = self.take_up(meant, deadline)?;
                let (id, sequence) = (request.sequence.request_id.clone(), &request.sequence);
                let (share, priority) = (sequence.share, sequence.priority);
                let claimed = watched::Claimed { source: request.source.clone(), share, priority };
                let events = service.decode(call, request)?;
                self.claims.add(id, claimed);
                Ok(events)
            }
            Serves::Prefill(_) => Err(no_such_service()),
        }
    }

    /// Prefills, as the service does that is called over gRPC.
    ///
    /// # Errors
    /// As the service.
    pub fn prefill(
        &self,
        meant: &Party,
        deadline: Instant,
        request: PrefillRequest,
    ) -> Result<mpsc::Receiver<Result<PrefillEvent, RequestError>>, RequestError> {
        match &self.serves {
            Serves::Prefill(service) => service.prefill(self.take_up(meant, deadline)?, request),
            Serves::Decode(_) => Err(no_such_service()),
        }
    }

    /// Reports to a router.
    pub fn reports(&self, cache_events: bool) -> mpsc::Receiver<Report> {
        self.service.reports(Wanted { cache: cache_events, adapters: false })
    }

    /// An operator drains it.
    pub fn start_drain(&self) {
        // Where it drains already, that goes on.
        let _ = self.service.start_drain(self.party(), Some(DRAIN_MAX));
    }
}

fn no_such_service() -> RequestError {
    RequestError::new(baton_types::ErrorKind::Unsupported, "a worker of another role was called")
}

fn record(
    plan: &WorkerPlan,
    party: Party,
    class: NumericsClass,
    memory: &Memory,
    transfer: &KvTransfer,
) -> InstanceRecord {
    let layout = memory.map.layout().clone();
    InstanceRecord {
        party,
        role: plan.role,
        labels: BTreeMap::new(),
        pool: "default".into(),
        endpoint: plan.name.clone(),
        card: ModelCard {
            id: MODEL.into(),
            served_names: Vec::new(),
            revision: String::new(),
            fingerprint: Digest([1; 32]),
            context_max: plan.engine.model_len_max as u32,
            vocab: plan.vocab(),
            end_tokens: plan.engine.end_tokens.clone(),
            defaults: SamplingDefaults::default(),
            bundle: None,
        },
        protocol: ProtocolRange::CURRENT,
        capacity_tokens: u64::from(memory.map.blocks(0)) * u64::from(layout.block_tokens()),
        shards: vec![Shard {
            transfer_address: transfer.address().to_bytes(),
            layers: 0..layout.groups().iter().map(|group| group.layers.len() as u32).sum(),
            kv_heads: 0..1,
        }],
        layout,
        class,
        running_max: plan.engine.running_max as u32,
        waiting_max: plan.engine.waiting_max as u32,
        capabilities: Vec::new(),
    }
}
