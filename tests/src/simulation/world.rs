//! One schedule: everything there is, and what happens in it, one event after the other.

use super::call::Call;
use super::clock::{Addr, Clock, Time, ms};
use super::counts::Counts;
use super::etcd::Etcd;
use super::event::Event;
use super::invariant::Invariant;
use super::model::{VOCAB, layout};
use super::mutant::Mutant;
use super::random::Random;
use super::router::Router;
use super::shape::{self, END, HEALED, Shape, TALK_ENDS};
use super::wire::Network;
use super::worker::{WAITING_MAX, Worker};
use baton_router::PrefillPolicy;
use baton_types::{
    Digest, Dtype, ErrorKind, Incarnation, InstanceId, InstanceRecord, ModelCard, NumericsClass, Party, ProtocolRange,
    Role, SamplingDefaults, Shard, TokenId,
};
use std::collections::{BTreeMap, VecDeque};

/// Events that a failure shows.
const SHOWN: usize = 60;

/// What a client asks, what is right, and how it ended.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) prompt: Vec<TokenId>,
    pub(super) max_tokens: usize,
    pub(super) policy: PrefillPolicy,
    pub(super) priority: i32,
    pub(super) at: Time,
    pub(super) deadline: Time,
    /// When its client goes.
    pub(super) gone: Option<Time>,
    pub(super) to: usize,
    pub(super) answer: Vec<TokenId>,
    pub(super) router: Option<Addr>,
    pub(super) last_token: Option<Time>,
    /// Nothing is broken when it comes.
    pub(super) must_succeed: bool,
    pub(super) outcome: Option<(Time, Option<ErrorKind>)>,
}

impl Request {
    pub(super) fn ended(&mut self, at: Time, error: Option<ErrorKind>) {
        self.outcome.get_or_insert((at, error));
    }
}

/// What runs in a process.
#[derive(Debug)]
pub(super) enum Node {
    Down,
    Router(Box<Router>),
    Worker(Box<Worker>),
}

/// A process slot: one start after the other at the same address.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) incarnation: u64,
    pub(super) is_up: bool,
    /// Stands still since this stop.
    pub(super) stalled: Option<u64>,
    /// What reached it while it stood still.
    pub(super) backlog: VecDeque<(Addr, Event)>,
    pub(super) device_fails: bool,
    pub(super) node: Node,
}

/// Everything there is.
pub(super) struct World {
    pub(super) clock: Clock,
    pub(super) random: Random,
    pub(super) shape: Shape,
    pub(super) mutant: Mutant,
    pub(super) counts: Counts,
    pub(super) procs: Vec<Process>,
    pub(super) instances: BTreeMap<InstanceId, usize>,
    pub(super) calls: Vec<Call>,
    pub(super) net: Network,
    pub(super) etcd: Etcd,
    pub(super) requests: Vec<Request>,
    /// Bytes were damaged under way on purpose: checksums may differ.
    pub(super) was_damaged: bool,
    /// A device failed on purpose, or the above: a request may end with an internal error.
    pub(super) may_break: bool,
    pub(super) stops: u64,
    pub(super) events: u64,
    failure: Option<(Invariant, String)>,
    shown: Option<VecDeque<String>>,
}

impl World {
    /// The world of a seed, before anything happens. `shows` keeps the last events as text.
    pub(super) fn new(seed: u64, mutant: Mutant, shows: bool) -> Self {
        let mut random = Random::new(seed);
        let shape = Shape::draw(&mut random);
        let requests = shape::requests(&shape, &mut random);
        let faults = shape::faults(&shape, requests.len(), &mut random);
        let mut clock = Clock::new();
        faults.into_iter().for_each(|(at, fault)| clock.post(at, Addr::WORLD, Event::Fault(fault)));
        clock.post(0, Addr::WORLD, Event::LeasesEnd);
        for (i, request) in requests.iter().enumerate() {
            clock.post(request.at, Addr::whoever(request.to), Event::Arrive(i));
            if let Some(gone) = request.gone {
                clock.post(gone, Addr::whoever(request.to), Event::ClientGone(i));
            }
        }
        let process = |_| Process {
            incarnation: 0,
            is_up: false,
            stalled: None,
            backlog: VecDeque::new(),
            device_fails: false,
            node: Node::Down,
        };
        let procs = (0..shape.processes()).map(process).collect();
        let instance = |p| (InstanceId::try_new(shape.name(p)).expect("a short name"), p);
        let instances = (shape.routers..shape.processes()).map(instance).collect();
        let mut world = Self {
            clock,
            random,
            mutant,
            counts: Counts::default(),
            procs,
            instances,
            calls: Vec::new(),
            net: Network::default(),
            etcd: Etcd::default(),
            requests,
            was_damaged: false,
            may_break: false,
            stops: 0,
            events: 0,
            failure: None,
            shown: shows.then(VecDeque::new),
            shape,
        };
        (0..world.procs.len()).for_each(|process| world.start(process));
        world
    }

    /// Runs to the end, or to the first broken invariant.
    pub(super) fn run(&mut self) -> Result<(), (Invariant, String)> {
        while let Some((to, event)) = self.clock.next(END) {
            self.events += 1;
            self.show(to, &event);
            self.deliver_event(to, event);
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        self.check_quiet();
        self.failure.take().map_or(Ok(()), Err)
    }

    fn deliver_event(&mut self, to: Addr, event: Event) {
        if to == Addr::WORLD {
            self.happens(event);
            return (self.shape.routers..self.procs.len()).for_each(|w| self.check_blocks(w));
        }
        let process = &mut self.procs[to.process];
        let is_it = to.incarnation == process.incarnation || to == Addr::whoever(to.process);
        if !process.is_up || !is_it {
            self.undelivered(event);
        } else if process.stalled.is_some() {
            process.backlog.push_back((to, event));
        } else if to.process < self.shape.routers {
            self.router_takes(to.process, event);
        } else {
            self.worker_takes(to.process, event);
            self.settle(to.process);
            self.check_blocks(to.process);
        }
    }

    /// Events of the world itself.
    fn happens(&mut self, event: Event) {
        match event {
            Event::Fault(fault) => self.fault(fault),
            Event::LeasesEnd => self.leases_end(),
            Event::Renew(owner) => self.renewed(owner),
            Event::Put { put } => self.put_arrives(put),
            other => self.fail(Invariant::Core, format!("nobody takes {other:?}")),
        }
    }

    fn router_takes(&mut self, r: usize, event: Event) {
        match event {
            Event::Arrive(request) => self.arrived(r, request),
            Event::Turn => self.take_turns(r),
            Event::ClientGone(request) => self.request_ends(r, request, Some(ErrorKind::Cancelled)),
            Event::Deadline(request) => self.request_ends(r, request, Some(ErrorKind::DeadlineExceeded)),
            Event::Again { request } => self.try_again(r, request),
            Event::ClaimLate { request, attempt } => self.claim_late(r, request, attempt),
            Event::DoubtEnds { request, attempt } => self.doubt_ends(r, request, attempt),
            Event::Said { call, said } => self.said(r, call, said),
            Event::Broken { call } => self.broken(r, call),
            Event::NoSign { call, stops } => self.no_sign(r, call, stops),
            Event::Report { party, report } => self.reported(r, &party, &report),
            Event::Watched { watch, what } => self.watched(r, watch, what),
            Event::WatchAgain => self.watch_again(r),
            Event::Beat { record } => self.beat(r, record),
            Event::LookForEnds => self.look_for_ends(r),
            Event::AskDoubted => self.ask_doubted(r),
            Event::Answered { party, alive } => self.answered(r, &party, alive),
            other => self.fail(Invariant::Core, format!("no router takes {other:?}")),
        }
    }

    fn worker_takes(&mut self, w: usize, event: Event) {
        match event {
            Event::Probe { router, party } => self.probed(w, router, party),
            Event::Open { call } => self.opened(w, call),
            Event::HangUp { call } => self.hang_up(w, call),
            Event::CancelIncoming { request } => self.cancel_incoming(w, &request),
            Event::CallDeadline { call } => self.call_deadline(w, call),
            Event::Engine => self.engine_turn(w),
            Event::StepEnd => self.step_ends(w),
            Event::LayerReady { key, layer, end, ok } => self.layer_ready(w, key, layer, end, ok),
            Event::Finish { key } => self.source_input(w, key, baton_kv_transfer::pure::SourceInput::Finish),
            Event::Wire { conn, wire } => self.wire_arrives(w, conn, wire),
            Event::Put { put } => self.put_arrives(put),
            Event::Flushed { key, epoch } => {
                self.source_input(w, key, baton_kv_transfer::pure::SourceInput::Flushed { epoch, ok: true });
            }
            Event::Sum { key, epoch, layer, tokens, hold } => {
                self.summed(w, key, epoch, layer, tokens);
                drop(hold);
            }
            Event::Check { key, runs } => self.check(w, key, &runs),
            Event::Granted { key } => self.granted(w, key),
            Event::ConnectionLost { conn } => self.connection_lost(self.addr(w), conn),
            Event::Silent { conn, process, stops } => self.silent(self.addr(w), conn, process, stops),
            Event::PeerDead { peer } => self.peer_is_dead(w, peer),
            Event::Tick => self.tick(w),
            Event::SendReports => self.send_reports(w),
            Event::ReportTo { router } => self.report_to(w, router),
            Event::SendRenewal => self.send_renewal(w),
            other => self.fail(Invariant::Core, format!("no worker takes {other:?}")),
        }
    }

    /// Posts something that reaches `to` after a short while.
    pub(super) fn post(&mut self, to: Addr, event: Event) {
        let at = self.clock.now() + 1 + self.random.below(400) as Time;
        self.clock.post(at, to, event);
    }

    /// How long a message takes.
    pub(super) fn delay(&mut self) -> Time {
        let slow = self.random.once_in(self.shape.slow_once_in) && self.clock.now() < HEALED;
        let most = if slow { ms(200) } else { ms(4) };
        50 + self.random.below(most as usize) as Time
    }

    pub(super) fn draw(&mut self, n: usize) -> usize {
        self.random.below(n)
    }

    /// An invariant is broken. The first one counts.
    pub(super) fn fail(&mut self, invariant: Invariant, what: String) {
        self.failure.get_or_insert((invariant, what));
    }

    /// Routers, workers and etcd stop talking of themselves.
    pub(super) fn is_over(&self) -> bool {
        self.clock.now() >= TALK_ENDS
    }

    pub(super) fn is_alive(&self, addr: Addr) -> bool {
        let process = &self.procs[addr.process];
        process.is_up && process.incarnation == addr.incarnation
    }

    pub(super) fn worker(&self, w: usize) -> Option<&Worker> {
        if let Node::Worker(worker) = &self.procs[w].node { Some(worker) } else { None }
    }

    pub(super) fn worker_mut(&mut self, w: usize) -> Option<&mut Worker> {
        if let Node::Worker(worker) = &mut self.procs[w].node { Some(worker) } else { None }
    }

    pub(super) fn router(&self, r: usize) -> Option<&Router> {
        if let Node::Router(router) = &self.procs[r].node { Some(router) } else { None }
    }

    pub(super) fn router_mut(&mut self, r: usize) -> Option<&mut Router> {
        if let Node::Router(router) = &mut self.procs[r].node { Some(router) } else { None }
    }

    pub(super) fn party(&self, addr: Addr) -> Party {
        let instance = InstanceId::try_new(self.shape.name(addr.process)).expect("a short name");
        Party { instance, incarnation: Incarnation(addr.incarnation) }
    }

    /// What a worker says of itself.
    pub(super) fn record(&self, w: usize) -> InstanceRecord {
        let is_prefill = w < self.shape.routers + self.shape.prefills;
        let card = ModelCard {
            id: "stand-in".into(),
            served_names: vec!["stand-in".into()],
            revision: String::new(),
            fingerprint: Digest([1; 32]),
            context_max: 4096,
            vocab: VOCAB,
            end_tokens: Vec::new(),
            defaults: SamplingDefaults::default(),
            bundle: None,
        };
        InstanceRecord {
            party: self.party(self.addr(w)),
            role: if is_prefill { Role::Prefill } else { Role::Decode },
            labels: BTreeMap::new(),
            pool: "default".into(),
            endpoint: format!("{}:1", self.shape.name(w)),
            card,
            protocol: ProtocolRange { min: 1, max: 1 },
            layout: layout(if is_prefill { 16 } else { self.shape.decode_block_tokens }),
            class: NumericsClass { isa: "hash".into(), weights: Dtype::F32, kv: Dtype::Bf16, kernel_revision: 1 },
            capacity_tokens: 0,
            running_max: self.shape.running_max as u32,
            waiting_max: WAITING_MAX as u32,
            shards: vec![Shard { transfer_address: vec![w as u8], layers: 0..2, kv_heads: 0..1 }],
            capabilities: Vec::new(),
        }
    }

    fn show(&mut self, to: Addr, event: &Event) {
        let is_routine = matches!(
            event,
            Event::Tick
                | Event::SendReports
                | Event::Report { .. }
                | Event::SendRenewal
                | Event::Renew(_)
                | Event::LeasesEnd
        );
        let Some(shown) = self.shown.as_mut().filter(|_| !is_routine) else { return };
        let who = if to == Addr::WORLD { "world".to_owned() } else { self.shape.name(to.process) };
        let stalled = self.procs.get(to.process).is_some_and(|p| p.stalled.is_some());
        let note = if stalled { " (stands still)" } else { "" };
        let text: String = format!("{event:?}").chars().take(220).collect();
        shown.push_back(format!("{:>9} us  {who}{note}: {text}", self.clock.now()));
        if shown.len() > SHOWN {
            shown.pop_front();
        }
    }

    /// The last events, where they were kept.
    pub(super) fn shown(&self) -> Vec<String> {
        let shape = format!("{:?}", self.shape);
        [shape].into_iter().chain(self.shown.iter().flatten().cloned()).collect()
    }
}

impl World {
    fn layer_ready(&mut self, w: usize, key: u64, layer: u32, end: u32, ok: bool) {
        use baton_kv_transfer::pure::SourceInput::{DeviceFailed, LayerReady};
        self.source_input(w, key, if ok { LayerReady { layer, tokens_end: end } } else { DeviceFailed });
    }
}
