//! Handoffs between two recorded GPUs, whose NICs move KV by themselves: a put writes the sink's memory, a get the reader's, and neither is
//! seen there until the device is told to show it. Two services in one thread, over a transport that is nothing but those NICs.

use baton_kernels::cuda::{Recording, recording};
use baton_kernels::device::Device;
use baton_kernels::numerics::{Half, TensorCore};
use baton_kv_transfer::simulation::*;
use baton_kv_transfer::*;
use baton_memory::PoolMemory;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// The only connection, from the first side to the second.
const CONN: ConnId = ConnId(1);
const TOKENS: u32 = 70;
const BLOCKS: [u32; 5] = [7, 2, 3, 0, 5];
const PATIENCE: Duration = Duration::from_secs(20);

/// What is on its way to each side: messages alone. `None` opens the connection.
type Wire = Rc<RefCell<[VecDeque<Option<Vec<u8>>>; 2]>>;

/// Memory of a GPU as a NIC reaches it.
#[derive(Clone)]
struct Reached {
    recording: Recording,
    address: u64,
}

impl Reached {
    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        self.recording.read_by_nic(self.address + at as u64, len)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.recording.write_by_nic(self.address + at as u64, bytes);
    }
}

struct Nic {
    side: usize,
    wire: Wire,
    bytes: usize,
    own: Reached,
    peer: Reached,
    done: Vec<Event>,
}

impl Transport for Nic {
    fn name(&self) -> &'static str {
        "simulated"
    }
    fn address(&self) -> TransferAddress {
        TransferAddress::Tcp(([127, 0, 0, 1], 1 + self.side as u16).into())
    }
    fn region(&self) -> RemoteRegion {
        RemoteRegion { bytes: self.bytes as u64, ..RemoteRegion::default() }
    }
    fn fences(&self) -> bool {
        true
    }
    fn closing_fences(&self, _: ConnId) -> bool {
        true
    }
    fn connect(&mut self, _: &TransferAddress) -> Result<ConnId, String> {
        self.wire.borrow_mut()[1 - self.side].push_back(None);
        Ok(CONN)
    }
    fn greeted(&mut self, _: ConnId, _: &RemoteRegion, _: usize) -> Result<(), String> {
        Ok(())
    }
    fn send(&mut self, _: ConnId, message: Vec<u8>) {
        self.wire.borrow_mut()[1 - self.side].push_back(Some(message));
    }
    fn put(&mut self, conn: ConnId, _: TicketId, run: CopyRun) {
        self.peer.write(run.to, &self.own.read(run.from, run.len));
        self.done.push(Event::PutDone(conn, run.len));
    }
    /// The peer's NIC has everything.
    fn flush(&mut self, conn: ConnId, id: u64) {
        self.done.push(Event::Flushed(conn, id));
    }
    fn one_sided_gets(&self, _: ConnId) -> bool {
        true
    }
    fn get(&mut self, _: ConnId, number: u64, run: CopyRun) {
        self.own.write(run.to, &self.peer.read(run.from, run.len));
        self.done.push(Event::Got(number, run.len));
    }
    fn open_window(&mut self, _: ConnId, _: TicketId, _: Window) {}
    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        self.done.push(Event::WindowClosed(conn, ticket));
    }
    fn close(&mut self, conn: ConnId, reason: &str) {
        self.done.push(Event::Closed {
            conn,
            reason: reason.to_owned(),
            fenced: true,
            draining: false,
            unproven: false,
        });
    }
    fn lanes(&self, _: ConnId) -> String {
        "nics".into()
    }
    fn progress(&mut self, _: Instant, events: &mut Vec<Event>) -> bool {
        events.append(&mut self.done);
        for message in self.wire.borrow_mut()[self.side].drain(..) {
            events.push(match message {
                None => Event::Accepted { conn: CONN, proven: false },
                Some(bytes) => Event::Message(CONN, bytes),
            });
        }
        false
    }
    fn shutdown(&mut self, _: Instant, events: &mut Vec<Event>) {
        self.close(CONN, "the end");
        events.append(&mut self.done);
    }
}

/// Computes and compares at once.
struct AtOnce(Arc<dyn PoolMemory>, KvPoolMap);

impl Verifier for AtOnce {
    fn submit(&mut self, job: Job) {
        job.run(&*self.0, &self.1);
    }
}

fn blocks() -> BlockTables {
    BlockTables::from_start(GroupBlocks(vec![BLOCKS.map(BlockId).to_vec()]))
}

struct Blocks(BlockTables);

impl BlockHold for Blocks {
    fn blocks(&self) -> &BlockTables {
        &self.0
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        self
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl QuarantinedBlocks for Blocks {
    fn release(self: Box<Self>) {}
}

/// Grants and pins the same blocks.
struct Worker;

impl SinkHandler for Worker {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.grant(Box::new(Blocks(blocks())));
    }
    fn verified(&self, _: VerifiedHandoff) -> Result<(), String> {
        Ok(())
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
    fn pin(&self, _: PinQuestion, reply: PinReply) {
        reply.pin(blocks(), Box::new(()));
    }
}

fn party(side: usize) -> Party {
    Party { instance: InstanceId::try_new(["p", "d"][side]).unwrap(), incarnation: Incarnation(1) }
}

struct World {
    sides: [(KvTransfer, Driver); 2],
    pools: [Arc<dyn PoolMemory>; 2],
    reached: [Reached; 2],
    now: Instant,
}

impl World {
    fn new(hazard: Option<Hazard>) -> Self {
        let layout = KvLayout::llama(16, 2, 2, 8, Dtype::Bf16).unwrap();
        let map = KvPoolMap::try_new(layout.clone(), 8).unwrap();
        let gpus = [0, 1].map(|_| {
            let (device, recording) = recording(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
            let pool = device.alloc_pool(&map).unwrap();
            let address = pool.dma_address().expect("NICs reach a recorder's memory");
            (pool, Reached { recording, address })
        });
        let wire = Wire::default();
        let sides = [0, 1].map(|side| {
            let class =
                NumericsClass { order: "t".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
            let compatibility = Compatibility { model: Digest([0; 32]), layout: layout.clone(), class };
            let choice = TransportChoice::tcp([127, 0, 0, 1].into());
            let mut config = TransferConfig::new(party(side), compatibility, map.clone(), choice);
            config.hazards = hazard.into();
            let pool = gpus[side].0.clone();
            let nic = Nic {
                side,
                wire: wire.clone(),
                bytes: pool.bytes(),
                own: gpus[side].1.clone(),
                peer: gpus[1 - side].1.clone(),
                done: Vec::new(),
            };
            let mut drawn = side as u64;
            let ports = Ports {
                transport: Box::new(nic),
                wake: Box::new(|| {}),
                verifier: Box::new(AtOnce(pool, map.clone())),
                calls: Box::new(Inline(Arc::new(Worker))),
                draw: Box::new(move || {
                    drawn += 2;
                    drawn
                }),
            };
            KvTransfer::drive(config, ports).unwrap()
        });
        let [first, second] = gpus;
        Self { sides, pools: [first.0, second.0], reached: [first.1, second.1], now: Instant::now() }
    }

    /// Turns both until the outcome is there.
    fn run<T>(&mut self, outcome: impl Future<Output = T>) -> T {
        let mut outcome = pin!(outcome);
        for _ in 0..10_000 {
            if let Poll::Ready(outcome) = outcome.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return outcome;
            }
            let turns = self.sides.each_mut().map(|(_, driver)| driver.turn(self.now));
            if !turns.iter().any(|turn| turn.worked) {
                self.now = turns.iter().map(|turn| turn.wake_at).min().unwrap();
            }
        }
        panic!("it never ends");
    }

    /// All of a pool, as its own device sees it.
    fn seen(&self, side: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.pools[side].bytes()];
        self.pools[side].read_by(Instant::now() + PATIENCE, 0, &mut bytes).unwrap();
        bytes
    }

    fn peer(&self) -> Peer {
        Peer { party: party(1), address: self.sides[1].0.address(), shard: 0 }
    }
}

/// What moves, as a device computed it.
fn noise(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| ((i * 31) >> 3) as u8 | 1).collect()
}

fn request() -> RequestId {
    RequestId::try_new("r").unwrap()
}

fn put(world: &mut World) -> PutOutcome {
    let kv = noise(world.pools[0].bytes());
    world.pools[0].write_by(Instant::now() + PATIENCE, 0, &kv).unwrap();
    let deadline = world.now + Duration::from_secs(10);
    let request = PutRequest { request_id: request(), tokens: TOKENS, blocks: blocks(), deadline, hold: Box::new(()) };
    let mut put = world.sides[0].0.put(&world.peer(), request).unwrap();
    let fence: Fence = Arc::new(AlreadyDone);
    (0..2).for_each(|layer| put.layer_launched(layer, TOKENS as usize, &fence));
    put.finish(CommitPayload { tokens: (0..=TOKENS).collect(), prompt_len: TOKENS, extra: Vec::new() });
    world.run(put.outcome())
}

fn get(world: &mut World) -> GetOutcome {
    let kv = noise(world.pools[1].bytes());
    world.pools[1].write_by(Instant::now() + PATIENCE, 0, &kv).unwrap();
    let request = GetRequest {
        request_id: request(),
        name: vec![1],
        from: 0,
        tokens: TOKENS,
        blocks: blocks(),
        deadline: world.now + Duration::from_secs(10),
        hold: Box::new(Blocks(blocks())),
    };
    let mut get = world.sides[0].0.get(&world.peer(), request).unwrap();
    world.run(get.outcome())
}

/// Bytes that are the KV of the other side.
fn moved(seen: &[u8]) -> usize {
    seen.iter().zip(noise(seen.len())).filter(|(seen, kv)| **seen == *kv).count()
}

#[test]
fn without_the_guard_a_device_compares_what_it_does_not_see_yet() {
    let mut world = World::new(Some(Hazard::UnseenWrites));
    let outcome = put(&mut world);
    assert!(matches!(outcome, Err(HandoffFailure::Corrupt(_))), "{outcome:?}");
    let bytes = world.pools[1].bytes();
    assert_eq!(moved(&world.seen(1)), 0, "a step would compute from this");
    assert!(moved(&world.reached[1].read(0, bytes)) > 0, "although all of it has come");
    let mut world = World::new(Some(Hazard::UnseenWrites));
    let outcome = get(&mut world).map(|report| report.bytes);
    assert!(matches!(outcome, Err(HandoffFailure::Corrupt(_))), "{outcome:?}");
}

#[test]
fn a_sink_sees_what_its_source_has_put() {
    let mut world = World::new(None);
    let report = put(&mut world).unwrap();
    assert_eq!(moved(&world.seen(1)) as u64, report.bytes);
}

#[test]
fn a_reader_sees_what_it_has_got() {
    let mut world = World::new(None);
    let report = get(&mut world).unwrap();
    assert_eq!(moved(&world.seen(0)) as u64, report.bytes);
}

/// The memory of a new pool is cleared on a stream, behind which no NIC waits.
#[test]
fn a_new_pool_clears_nothing_that_a_nic_has_stored() {
    let world = World::new(None);
    let kv = noise(4096);
    world.reached[0].write(0, &kv);
    world.pools[0].show_remote_writes().unwrap();
    assert!(world.seen(0)[..4096] == kv, "it was cleared");
}
