//! Two instances in one process: pools that count their blocks, sinks that record what they are given, gates that hold phases.
#![allow(dead_code, missing_docs, unreachable_pub)] // Each test binary uses its part.

pub mod authority;
pub mod parts;
pub mod pool;
pub mod process;
pub mod sockets;

use baton_kv_transfer::shards::{Assembly, Joined};
use baton_kv_transfer::*;
use baton_memory::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use parts::Cached;
pub use pool::{Hold, Pool};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for anything that must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// UCX's puts on lanes that emulate them.
pub fn ucx_one_sided() -> TransportChoice {
    let (lanes, bind) = (UcxLanes::LoopbackTcp, [127, 0, 0, 1].into());
    TransportChoice::Ucx { lanes, bind, port: 0, devices: None, writes: UcxWrites::OneSided }
}

thread_local! {
    static CREDENTIALS: RefCell<Option<Arc<dyn Credentials>>> = const { RefCell::new(None) };
}

/// Runs a test whose instances, all made on this thread, are workers of one authority and speak in TLS.
pub fn in_tls(test: impl FnOnce()) {
    CREDENTIALS.set(Some(authority::Authority::new().worker()));
    test();
    CREDENTIALS.set(None);
}

/// Where the pool of an instance is.
#[derive(Clone, Debug)]
pub enum Memory {
    Host,
    Remote,
    Given(Arc<dyn PoolMemory>),
}

impl Memory {
    fn allocate(self, bytes: usize) -> Arc<dyn PoolMemory> {
        match self {
            Self::Host => HostPool::new(bytes).unwrap(),
            Self::Remote => RemotePool::new(bytes, RemoteConfig::default()).unwrap(),
            Self::Given(memory) => memory,
        }
    }
}

thread_local! {
    /// Where the pool of the instance of this name is.
    static MEMORY: Cell<fn(&str) -> Memory> = const { Cell::new(host) };
}

/// Runs a test whose instances, all made on this thread, have their pools where `memory` says for their names.
pub fn in_memory(memory: fn(&str) -> Memory, test: impl FnOnce()) {
    MEMORY.set(memory);
    test();
    MEMORY.set(host);
}

fn host(_: &str) -> Memory {
    Memory::Host
}

/// All pools are remote.
pub fn remote(_: &str) -> Memory {
    Memory::Remote
}

/// Sources (`p`) have remote pools, and sinks pools of the host.
pub fn mixed(name: &str) -> Memory {
    if name.starts_with('p') { Memory::Remote } else { Memory::Host }
}

/// Whether it is such a test that runs in TLS.
pub fn is_in_tls() -> bool {
    CREDENTIALS.with_borrow(Option::is_some)
}

/// Waits until `done`; panics with `what` if that never comes.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What a sink does with an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Grants at once.
    Ready,
    /// Keeps the reply until [`TestSink::answer`].
    Later,
    /// Grants what is claimed, once.
    Claimed,
    /// Drops the reply.
    None,
    Panic,
}

/// What the shards of an instance share.
pub struct Joint {
    pub assembly: Assembly,
    pub adopted: Mutex<HashMap<String, Vec<VerifiedHandoff>>>,
    pub transfers: Mutex<Vec<KvTransfer>>,
}

pub struct TestSink {
    pool: Arc<Pool>,
    map: KvPoolMap,
    seed: u64,
    pub room: Mutex<Room>,
    pub adopt: Mutex<Result<(), String>>,
    /// What is here already of an offer.
    pub cached: Mutex<Cached>,
    waiting: Mutex<Vec<(ReserveOffer, GrantReply)>>,
    claims: Mutex<Vec<(String, Party, u32)>>,
    adopted: Mutex<HashMap<String, VerifiedHandoff>>,
    failed: Mutex<Vec<(String, HandoffFailure)>>,
    /// What peers may read, by name.
    served: Mutex<HashMap<Vec<u8>, Arc<Hold>>>,
    shard: HeadShard,
    joint: Option<Arc<Joint>>,
    changed: Condvar,
}

impl TestSink {
    fn grant(&self, offer: &ReserveOffer, reply: GrantReply) {
        let count = self.map.layout().blocks_for(offer.tokens as usize);
        match self.pool.take(count, self.seed) {
            Some(mut hold) => {
                hold.cached = (self.cached.lock().unwrap())(offer);
                reply.grant(hold);
            }
            None => reply.refuse(RefuseReason::NoRoom, "the pool is full"),
        }
    }

    /// Answers what waits.
    pub fn answer(&self) {
        for (offer, reply) in std::mem::take(&mut *self.waiting.lock().unwrap()) {
            self.grant(&offer, reply);
        }
    }

    /// From now on only what is claimed is granted: by request, source and tokens, as decode workers do.
    pub fn claim(&self, request: &str, source: &Party, tokens: u32) {
        *self.room.lock().unwrap() = Room::Claimed;
        self.claims.lock().unwrap().push((request.to_owned(), source.clone(), tokens));
    }

    fn grant_if_claimed(&self, offer: &ReserveOffer, reply: GrantReply) {
        let wanted = (offer.request_id.as_str().to_owned(), offer.source.clone(), offer.tokens);
        let mut claims = self.claims.lock().unwrap();
        match claims.iter().position(|claim| *claim == wanted) {
            Some(at) => {
                claims.swap_remove(at);
                self.grant(offer, reply);
            }
            None => reply.refuse(RefuseReason::UnknownRequest, "no such claim stands"),
        }
    }

    pub fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    pub fn take_adopted(&self, request: &str) -> Option<VerifiedHandoff> {
        self.adopted.lock().unwrap().remove(request)
    }

    pub fn failures(&self) -> Vec<(String, HandoffFailure)> {
        self.failed.lock().unwrap().clone()
    }
}

impl SinkHandler for TestSink {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        match *self.room.lock().unwrap() {
            Room::Ready => self.grant(&offer, reply),
            Room::Later => self.waiting.lock().unwrap().push((offer, reply)),
            Room::Claimed => self.grant_if_claimed(&offer, reply),
            Room::None => {}
            Room::Panic => panic!("as the test asks"),
        }
    }
    fn verified(&self, handoff: VerifiedHandoff) -> Result<(), String> {
        self.adopt.lock().unwrap().clone()?;
        let name = handoff.request_id.as_str().to_owned();
        assert!(self.adopted.lock().unwrap().insert(name, handoff).is_none(), "adopted twice");
        Ok(())
    }
    fn failed(&self, request_id: &RequestId, reason: HandoffFailure) {
        self.failed.lock().unwrap().push((request_id.as_str().to_owned(), reason));
        if let Some(joint) = &self.joint {
            joint.assembly.failed(request_id);
            let shards = joint.transfers.lock().unwrap();
            shards.iter().for_each(|transfer| transfer.cancel(request_id, "another shard failed"));
        }
    }
    fn arrived(&self, handoff: VerifiedHandoff, reply: AdoptReply) -> Option<Result<(), String>> {
        let Some(joint) = &self.joint else {
            reply.answer(self.verified(handoff));
            return None;
        };
        let name = handoff.request_id.as_str().to_owned();
        joint.assembly.arrived(self.shard.index(), handoff, reply, |parts| {
            assert!(joint.adopted.lock().unwrap().insert(name, parts).is_none(), "adopted twice");
            Ok(())
        });
        None
    }
    fn pin(&self, question: PinQuestion, reply: PinReply) {
        let held = self.served.lock().unwrap().get(&question.name).cloned();
        match held {
            Some(hold) => reply.pin(hold.blocks_from(question.from), Box::new(hold)),
            None => reply.refuse(RefuseReason::UnknownRequest, "no such name"),
        }
    }
}

/// Holds phases open, and bends messages.
#[derive(Default)]
pub struct Gate {
    held: Mutex<BTreeSet<HoldPoint>>,
    bend: Mutex<Option<Bend>>,
}

pub type Bend = Box<dyn Fn(Vec<u8>) -> Vec<Vec<u8>> + Send>;

impl Gate {
    pub fn hold(&self, phase: HoldPoint) {
        self.held.lock().unwrap().insert(phase);
    }
    pub fn open(&self, phase: HoldPoint) {
        self.held.lock().unwrap().remove(&phase);
    }
    /// `bend` sees each encoded message; its kind is the fourth byte.
    pub fn bend(&self, bend: impl Fn(Vec<u8>) -> Vec<Vec<u8>> + Send + 'static) {
        *self.bend.lock().unwrap() = Some(Box::new(bend));
    }
}

impl TransferHooks for Gate {
    fn hold(&self, phase: HoldPoint, _: &RequestId) -> bool {
        self.held.lock().unwrap().contains(&phase)
    }
    fn bend_message(&self, _: Option<&Party>, message: Vec<u8>) -> Vec<Vec<u8>> {
        match &*self.bend.lock().unwrap() {
            Some(bend) => bend(message),
            None => vec![message],
        }
    }
}

/// One instance.
pub struct Node {
    pub transfer: KvTransfer,
    pub memory: Arc<dyn PoolMemory>,
    pub map: KvPoolMap,
    pub pool: Arc<Pool>,
    pub sink: Arc<TestSink>,
    pub gate: Arc<Gate>,
}

#[derive(Clone)]
pub struct NodeConfig {
    pub name: &'static str,
    pub incarnation: u64,
    pub layout: KvLayout,
    pub blocks: u32,
    pub model: u8,
    pub kernel_revision: u32,
    pub seed: u64,
    pub limits: TransferLimits,
    pub hazards: Hazards,
    pub protocol: ProtocolRange,
    /// Which part of the layout its pool holds.
    pub shard: HeadShard,
    pub joint: Option<Arc<Joint>>,
    pub credentials: Option<Arc<dyn Credentials>>,
    pub encrypt: bool,
    /// Where its pool is.
    pub memory: Memory,
}

impl NodeConfig {
    pub fn new(name: &'static str, layout: KvLayout, blocks: u32) -> Self {
        let limits = TransferLimits { epoch_bytes: 16 << 10, ..TransferLimits::default() };
        let (hazards, protocol, joint) = Default::default();
        let (incarnation, model, kernel_revision, shard, seed) = (1, 1, 1, HeadShard::WHOLE, 0x9e37_79b9);
        Self {
            name,
            incarnation,
            layout,
            blocks,
            model,
            kernel_revision,
            seed,
            limits,
            hazards,
            protocol,
            shard,
            joint,
            credentials: CREDENTIALS.with_borrow(Clone::clone),
            encrypt: true,
            memory: MEMORY.get()(name),
        }
    }

    pub fn start(self, transport: TransportChoice) -> Node {
        self.try_start(transport).unwrap()
    }

    pub fn try_start(self, transport: TransportChoice) -> Result<Node, TransferError> {
        let map = KvPoolMap::try_new(self.shard.part(&self.layout).unwrap(), self.blocks).unwrap();
        let memory = self.memory.allocate(map.bytes());
        let (order, weights) = ("test".into(), Dtype::Bf16.into());
        let (kv, kernel_revision) = (Dtype::Bf16, self.kernel_revision);
        let class = NumericsClass { order, weights, kv, kernel_revision };
        let compatibility = Compatibility { model: Digest([self.model; 32]), layout: self.layout, class };
        let party =
            Party { instance: InstanceId::try_new(self.name).unwrap(), incarnation: Incarnation(self.incarnation) };
        let gate = Arc::<Gate>::default();
        let pool = Pool::new(&map);
        let sink = Arc::new(TestSink {
            pool: pool.clone(),
            map: map.clone(),
            seed: self.seed,
            room: Mutex::new(Room::Ready),
            adopt: Mutex::new(Ok(())),
            cached: Mutex::new(parts::none_cached()),
            waiting: Mutex::default(),
            claims: Mutex::default(),
            adopted: Mutex::default(),
            failed: Mutex::default(),
            served: Mutex::default(),
            shard: self.shard,
            joint: self.joint.clone(),
            changed: Condvar::new(),
        });
        let mut config = TransferConfig::new(party, compatibility, map.clone(), transport);
        (config.limits, config.hooks, config.shard) = (self.limits, gate.clone(), self.shard);
        (config.protocol, config.hazards) = (self.protocol, self.hazards);
        (config.credentials, config.encrypt) = (self.credentials, self.encrypt);
        let handler: Arc<dyn SinkHandler> = match self.joint {
            Some(_) => Arc::new(Joined::new(sink.clone())),
            None => sink.clone(),
        };
        let transfer = KvTransfer::start(config, memory.clone(), handler)?;
        Ok(Node { transfer, memory, map, pool, sink, gate })
    }
}

impl Node {
    pub fn peer(&self) -> Peer {
        Peer { party: self.transfer.party().clone(), address: self.transfer.address(), shard: 0 }
    }

    /// Fills the blocks of a new sequence of `tokens` with noise, and offers it.
    pub fn offer(&self, to: &Peer, request: &str, tokens: u32, seed: u64) -> (PutHandle, BlockTables) {
        self.offer_until(to, request, tokens, seed, Instant::now() + PATIENCE)
    }

    pub fn offer_until(
        &self,
        to: &Peer,
        request: &str,
        tokens: u32,
        seed: u64,
        deadline: Instant,
    ) -> (PutHandle, BlockTables) {
        let hold = self.pool.take(self.map.layout().blocks_for(tokens as usize), seed).expect("the pool has room");
        let blocks = hold.blocks.clone();
        self.fill(&blocks, seed);
        let request_id = RequestId::try_new(request).unwrap();
        let request = PutRequest { request_id, tokens, blocks: blocks.clone(), deadline, hold };
        (self.transfer.put(to, request).unwrap(), blocks)
    }

    /// Lets peers read a sequence of `tokens` of noise under this name, until [`Node::evict`].
    pub fn serve(&self, name: &str, tokens: u32, seed: u64) -> BlockTables {
        let hold = self.pool.take(self.map.layout().blocks_for(tokens as usize), seed).expect("the pool has room");
        let blocks = hold.blocks.clone();
        self.fill(&blocks, seed);
        self.sink.served.lock().unwrap().insert(name.as_bytes().to_vec(), Arc::from(hold));
        blocks
    }

    /// Its blocks are back once nobody reads them.
    pub fn evict(&self, name: &str) {
        self.sink.served.lock().unwrap().remove(name.as_bytes());
    }

    /// Begins to read what a peer serves, as request `r`.
    pub fn get(&self, from: &Peer, name: &str, tokens: u32, deadline: Instant) -> (GetHandle, BlockTables) {
        let (get, blocks) = self.get_part(from, name, 0..tokens, deadline);
        (get.unwrap(), blocks)
    }

    /// Fills blocks with noise, the same for the same seed.
    pub fn fill(&self, blocks: &BlockTables, seed: u64) {
        let (mut state, mut all) = (seed | 1, Vec::new());
        for (g, group) in self.map.layout().groups().iter().enumerate() {
            for layer in 0..group.layers.len() {
                for &block in &blocks.0[g].blocks {
                    let at = self.map.plane_offset(g, layer, block, 0);
                    let mut noise = vec![0u8; group.token_bytes() * self.map.layout().block_tokens() as usize];
                    for byte in &mut noise {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        *byte = (state >> 56) as u8;
                    }
                    all.push((at, noise));
                }
            }
        }
        self.write_all(all);
    }

    /// Every byte of positions `0..tokens`, in an order that no block size enters.
    pub fn bytes_of(&self, blocks: &BlockTables, tokens: u32) -> Vec<u8> {
        self.read_all(&self.places(blocks, 0..tokens))
    }

    /// Launches every layer for `0..tokens` in chunks, all finished.
    pub fn launch(&self, put: &PutHandle, tokens: u32, chunk: u32) {
        let fence: Fence = Arc::new(AlreadyDone);
        for end in (0..tokens).step_by(chunk as usize).map(|at| (at + chunk).min(tokens)) {
            let layers = self.map.layout().groups().iter().flat_map(|g| &g.layers);
            layers.for_each(|&layer| put.layer_launched(layer, end as usize, &fence));
        }
    }

    /// Launches and finishes.
    pub fn send_all(&self, put: &PutHandle, tokens: u32) {
        self.launch(put, tokens, tokens.div_ceil(3).max(1));
        put.finish(commit(tokens));
    }

    /// Adopted under this name, with the bytes of the source's blocks; gives the blocks back.
    pub fn check_adopted(&self, request: &str, source: &Node, blocks: &BlockTables, tokens: u32) {
        let handoff = self.sink.take_adopted(request).expect("adopted");
        assert_eq!(handoff.tokens, commit(tokens).tokens);
        assert_eq!(handoff.kv_tokens, tokens);
        assert_eq!(handoff.extra, commit(tokens).extra);
        let arrived = self.bytes_of(handoff.hold.blocks(), tokens);
        assert!(arrived == source.bytes_of(blocks, tokens), "{request}: other bytes arrived than were sent");
        assert_eq!(handoff.bytes, arrived.len() as u64);
    }

    pub fn stop(&self) {
        self.transfer.stop(Instant::now() + Duration::from_secs(5));
    }

    /// All blocks are back in the pool, and the service knows of nothing open.
    pub fn is_quiet(&self) -> bool {
        let stats = self.transfer.stats();
        let over = stats.sources == 0 && stats.sinks == 0 && stats.tickets == 0 && stats.indexed == 0;
        self.pool.is_whole() && over && stats.readers == 0 && stats.owners == 0
    }
}

pub fn commit(tokens: u32) -> CommitPayload {
    CommitPayload { tokens: (0..=tokens).map(|t| t * 3).collect(), prompt_len: tokens, extra: b"extra".to_vec() }
}

/// A small layout of one group: 2 layers of k and v.
pub fn small(block_tokens: u32) -> KvLayout {
    KvLayout::llama(block_tokens, 2, 2, 24, Dtype::Bf16).unwrap()
}

/// A fence that tests open.
#[derive(Default)]
pub struct ManualFence(Mutex<Option<FenceStatus>>);

impl ManualFence {
    pub fn set(&self, status: FenceStatus) {
        *self.0.lock().unwrap() = Some(status);
    }
}

impl FencePoll for ManualFence {
    fn poll(&self) -> FenceStatus {
        self.0.lock().unwrap().unwrap_or(FenceStatus::Pending)
    }
}
