//! One instance: its service, pool and sink.

use super::gate::Gate;
use super::pool::Pool;
use super::setting::{Memory, credentials, memory_of};
use super::sink::{Joint, TestSink};
use super::{PATIENCE, commit};
use baton_kv_transfer::shards::Joined;
use baton_kv_transfer::*;
use baton_memory::PoolMemory;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
            credentials: credentials(),
            encrypt: true,
            memory: memory_of(name),
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
        let sink = TestSink::new(&pool, &map, self.seed, self.shard, self.joint.clone());
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
        self.sink.serve(name, hold);
        blocks
    }

    /// Its blocks are back once nobody reads them.
    pub fn evict(&self, name: &str) {
        self.sink.evict(name);
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
                    let mut noise = vec![0u8; group.layer_block_bytes(self.map.layout().block_tokens())];
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
