//! The shipped driver over each kind of lane.

use super::*;
use crate::executor::ms;
use crate::worker::transfer::{Site, Tempo, start};
use baton_kv_transfer::{
    AdoptReply, BlockHold, CommitPayload, GrantReply, HandoffFailure, KvTransfer, Party, Peer, PutOutcome, PutRequest,
    QuarantinedBlocks, ReserveOffer, SinkHandler, TransferConfig, TransportChoice, VerifiedHandoff,
};
use baton_memory::HostPool;
use baton_types::fence::AlreadyDone;
use baton_types::{
    BlockId, BlockTable, BlockTables, Compatibility, Digest, Dtype, Fence, Incarnation, InstanceId, KvLayout,
    KvPoolMap, NumericsClass, RequestId,
};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const TOKENS: u32 = 40;
const SINK_BLOCKS: [u32; 3] = [3, 0, 2];

/// What became of the sink's blocks, in order.
type Notes = Arc<Mutex<Vec<&'static str>>>;

/// How often blocks of a worker were given back.
#[derive(Default)]
struct GivenBack(AtomicU64);

impl HeldBlocks for GivenBack {
    fn mark(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn are_held_since(&self, mark: u64, _: Range<usize>) -> bool {
        self.mark() == mark
    }
    fn quarantined_of(&self, _: &Party) -> usize {
        0
    }
}

struct Held(Notes, BlockTables, Arc<GivenBack>);

impl Drop for Held {
    fn drop(&mut self) {
        self.2.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl BlockHold for Held {
    fn blocks(&self) -> &BlockTables {
        &self.1
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        self.0.lock().push("quarantined");
        self
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl QuarantinedBlocks for Held {
    fn release(self: Box<Self>) {
        self.0.lock().push("released");
    }
}

/// Grants [`SINK_BLOCKS`] to whoever asks.
struct Sink(Notes, Arc<GivenBack>);

impl SinkHandler for Sink {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.grant(Box::new(Held(self.0.clone(), blocks(SINK_BLOCKS), self.1.clone())));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        self.0.lock().push("adopted");
        drop(handoff);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {
        self.0.lock().push("failed");
    }
}

fn blocks(ids: [u32; 3]) -> BlockTables {
    BlockTables(vec![BlockTable::from_start(ids.map(BlockId).to_vec())])
}

fn map() -> KvPoolMap {
    KvPoolMap::try_new(KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap(), 4).unwrap()
}

/// Two workers, `a` that puts and `b` that takes in.
struct Pair {
    executor: Executor,
    network: Network,
    ends: [(Process, KvTransfer, Arc<HostPool>); 2],
    notes: Notes,
    breaches: Arc<Mutex<Vec<String>>>,
}

impl Pair {
    fn new(lane: Lane, seed: u64) -> Self {
        let executor = Executor::new(seed, Duration::from_micros(300));
        let (notes, breaches) = (Notes::default(), Arc::new(Mutex::new(Vec::new())));
        let tell = breaches.clone();
        let delays = Delays::Drawn { slow_once_in: 10, slow_until: ms(1_000) };
        let network =
            Network::new(executor.clone(), lane, false, delays, Box::new(move |_, breach| tell.lock().push(breach)));
        let ends = [("a", 1), ("b", 2)].map(|(name, host)| {
            let process = executor.start();
            let site = Site {
                executor: executor.clone(),
                network: network.clone(),
                process,
                address: ([127, 0, 0, host], 1).into(),
                tempo: Tempo::DRAWN,
                moved: Arc::default(),
            };
            let layout = map().layout().clone();
            let class =
                NumericsClass { order: "t".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
            let compatibility = Compatibility { model: Digest([0; 32]), layout, class };
            let party = Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) };
            let choice = TransportChoice::tcp([127, 0, 0, 1].into());
            let mut config = TransferConfig::new(party, compatibility, map(), choice);
            config.limits.quarantined_blocks_max = 4;
            let region = HostPool::new(map().bytes()).unwrap();
            let held = Arc::new(GivenBack::default());
            let sink = Arc::new(Sink(notes.clone(), held.clone()));
            (process, start(site, config, region.clone(), sink, held).unwrap(), region)
        });
        Self { executor, network, ends, notes, breaches }
    }

    /// Puts [`TOKENS`] from `a` to `b` while `meanwhile` happens, and says how that went.
    fn put(&self, meanwhile: impl FnOnce(&Self)) -> Option<PutOutcome> {
        let [(process, source, region), (_, sink, _)] = &self.ends;
        let bytes: Vec<u8> = (0..region.bytes()).map(|i| (i % 251) as u8).collect();
        region.copy_in(0, &bytes);
        let peer = Peer { party: sink.party().clone(), address: sink.address(), shard: 0 };
        let request = PutRequest {
            request_id: RequestId::try_new("r").unwrap(),
            tokens: TOKENS,
            blocks: blocks([0, 1, 2]),
            deadline: self.executor.instant(ms(5_000)),
            hold: Box::new(()),
        };
        let mut handle = source.put(&peer, request).unwrap();
        let fence: Fence = Arc::new(AlreadyDone);
        for layer in 0..2 {
            handle.layer_launched(layer, TOKENS as usize, &fence);
        }
        handle.finish(CommitPayload { tokens: (0..TOKENS).collect(), prompt_len: TOKENS, extra: Vec::new() });
        let outcome = Arc::new(Mutex::new(None));
        let told = outcome.clone();
        self.executor.spawn(*process, async move { *told.lock() = Some(handle.outcome().await) });
        meanwhile(self);
        while self.executor.step(ms(8_000)) {}
        self.executor.end();
        outcome.lock().take()
    }

    fn arrived(&self) -> bool {
        let [(_, _, from), (_, _, to)] = &self.ends;
        (0..TOKENS).all(|token| {
            (0..2).all(|layer| {
                (0..2).all(|plane| {
                    let within = token % 16..token % 16 + 1;
                    let read = |region: &HostPool, block| {
                        let range = map().token_range(0, layer, BlockId(block), plane, within.clone());
                        let mut bytes = vec![0; range.len()];
                        region.copy_out(range.start, &mut bytes);
                        bytes
                    };
                    read(from, token / 16) == read(to, SINK_BLOCKS[(token / 16) as usize])
                })
            })
        })
    }
}

#[test]
fn kv_arrives_whole_over_every_lane() {
    for lane in Lane::ALL {
        for seed in 0..20 {
            let pair = Pair::new(lane, seed);
            let outcome = pair.put(|_| {});
            assert!(matches!(outcome, Some(Ok(_))), "{lane:?}, {seed}: {outcome:?}");
            assert!(pair.arrived(), "{lane:?}, {seed}");
            assert_eq!(*pair.notes.lock(), ["adopted"], "{lane:?}, {seed}");
            assert_eq!(*pair.breaches.lock(), [""; 0]);
        }
    }
}

#[test]
fn a_damaged_write_is_noticed() {
    for lane in Lane::ALL {
        let pair = Pair::new(lane, 7);
        let outcome = pair.put(|pair| pair.network.damage(pair.ends[0].0));
        assert!(matches!(outcome, Some(Err(_))), "{lane:?}: {outcome:?}");
        assert_eq!(pair.notes.lock().first(), Some(&"failed"), "{lane:?}");
    }
}

#[test]
fn a_cut_link_fails_the_put_or_comes_too_late() {
    for lane in Lane::ALL {
        let mut failed = 0;
        for seed in 0..40 {
            let pair = Pair::new(lane, seed);
            let outcome = pair.put(|pair| {
                let (network, ends) = (pair.network.clone(), [pair.ends[0].0, pair.ends[1].0]);
                pair.executor.call(ms(seed), Process::WORLD, move || network.cut(ends[0], ends[1]));
            });
            let outcome = outcome.expect("an end");
            failed += u32::from(outcome.is_err());
            let notes = pair.notes.lock().clone();
            assert!(outcome.is_err() || (notes == ["adopted"] && pair.arrived()), "{lane:?}, {seed}: {notes:?}");
            assert_eq!(*pair.breaches.lock(), [""; 0], "{lane:?}, {seed}");
        }
        assert!((1..40).contains(&failed), "{lane:?}: {failed} of 40");
    }
}

#[test]
fn the_death_of_a_source_frees_what_it_was_granted() {
    for lane in Lane::ALL {
        for seed in 0..40 {
            let pair = Pair::new(lane, seed);
            let outcome = pair.put(|pair| {
                let (executor, network, source) = (pair.executor.clone(), pair.network.clone(), pair.ends[0].0);
                pair.executor.call(ms(seed), Process::WORLD, move || {
                    executor.kill(source);
                    network.died(source, seed % 2 == 0);
                });
            });
            let notes = pair.notes.lock().clone();
            // Its task died with it, unless the put was over.
            assert!(outcome.is_none() || notes == ["adopted"], "{lane:?}, {seed}: {outcome:?}, {notes:?}");
            let is_known = [&[][..], &["adopted"], &["failed"], &["quarantined", "failed"]].contains(&&notes[..]);
            assert!(is_known, "{lane:?}, {seed}: {notes:?}");
            assert!(!notes.contains(&"quarantined") || lane == Lane::SharedMemory, "{seed}: {notes:?}");
            assert_eq!(*pair.breaches.lock(), [""; 0]);
        }
    }
}

#[test]
fn a_wire_of_one_speed_sends_one_write_after_the_other() {
    let executor = Executor::new(1, Duration::ZERO);
    let delays = Delays::Steady { message: 125, bytes_per_s: 1e6 };
    let network = Network::new(executor.clone(), Lane::QueuePair, false, delays, Box::new(|_, _| {}));
    let [one, other] = [(); 2].map(|()| executor.start());
    assert_eq!([1_000, 500].map(|bytes| network.arrival(one, bytes)), [1_125, 1_625]);
    assert_eq!((network.arrival(other, 10), network.delay()), (135, 125), "each has its own");
}
