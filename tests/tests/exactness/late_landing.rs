//! Handoffs between two recorded GPUs, whose NICs move KV by themselves: a put writes the sink's memory, a get the reader's, and neither is
//! seen there until the device is told to show it, not even after blocks are free. Two services in one thread, over a transport that is
//! nothing but those NICs.

use baton_kernels::cuda::{Recording, recording};
use baton_kernels::device::Device;
use baton_kernels::numerics::{Half, TensorCore};
use baton_kv_transfer::simulation::*;
use baton_kv_transfer::*;
use baton_memory::{MemoryError, PoolMemory};
use baton_types::fence::AlreadyDone;
use baton_types::*;
use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
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
    pool: Arc<dyn PoolMemory>,
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
        RemoteRegion { bytes: self.pool.bytes() as u64, ..RemoteRegion::default() }
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
    fn show_remote_writes(&self) -> Result<(), MemoryError> {
        self.pool.show_remote_writes()
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

/// Blocks that write down when they are free.
struct Blocks(BlockTables, Arc<AtomicBool>);

impl Blocks {
    fn held(are_free: &Arc<AtomicBool>) -> Box<Self> {
        are_free.store(false, Relaxed);
        Box::new(Self(blocks(), are_free.clone()))
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.1.store(true, Relaxed);
    }
}

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
struct Worker(Arc<AtomicBool>);

impl SinkHandler for Worker {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.grant(Blocks::held(&self.0));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
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
    /// Whether what was granted, or read into, is free.
    are_free: Arc<AtomicBool>,
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
        let (wire, are_free) = (Wire::default(), Arc::<AtomicBool>::default());
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
                pool: pool.clone(),
                own: gpus[side].1.clone(),
                peer: gpus[1 - side].1.clone(),
                done: Vec::new(),
            };
            let mut drawn = side as u64;
            let ports = Ports {
                transport: Box::new(nic),
                wake: Box::new(|| {}),
                verifier: Box::new(AtOnce(pool, map.clone())),
                calls: Box::new(Inline(Arc::new(Worker(are_free.clone())))),
                draw: Box::new(move || {
                    drawn += 2;
                    drawn
                }),
            };
            KvTransfer::drive(config, ports).unwrap()
        });
        let [first, second] = gpus;
        Self { sides, pools: [first.0, second.0], reached: [first.1, second.1], are_free, now: Instant::now() }
    }

    /// Turns both until the outcome is there.
    fn run<T>(&mut self, outcome: impl Future<Output = T>) -> T {
        let mut outcome = pin!(outcome);
        self.until(|_| match outcome.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(outcome) => Some(outcome),
            Poll::Pending => None,
        })
    }

    /// The same until there is something.
    fn until<T>(&mut self, mut there_is: impl FnMut(&Self) -> Option<T>) -> T {
        for _ in 0..10_000 {
            if let Some(found) = there_is(self) {
                return found;
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

fn begin_put(world: &mut World) -> PutHandle {
    let kv = noise(world.pools[0].bytes());
    world.pools[0].write_by(Instant::now() + PATIENCE, 0, &kv).unwrap();
    let deadline = world.now + Duration::from_secs(10);
    let request = PutRequest { request_id: request(), tokens: TOKENS, blocks: blocks(), deadline, hold: Box::new(()) };
    world.sides[0].0.put(&world.peer(), request).unwrap()
}

fn launch(put: &PutHandle, layers: std::ops::Range<u32>) {
    let fence: Fence = Arc::new(AlreadyDone);
    layers.for_each(|layer| put.layer_launched(layer, TOKENS as usize, &fence));
}

fn put(world: &mut World) -> PutOutcome {
    let mut put = begin_put(world);
    launch(&put, 0..2);
    put.finish(CommitPayload { tokens: (0..=TOKENS).collect(), prompt_len: TOKENS, extra: Vec::new() });
    world.run(put.outcome())
}

fn begin_get(world: &mut World) -> GetHandle {
    let kv = noise(world.pools[1].bytes());
    world.pools[1].write_by(Instant::now() + PATIENCE, 0, &kv).unwrap();
    let request = GetRequest {
        request_id: request(),
        name: vec![1],
        from: 0,
        tokens: TOKENS,
        blocks: blocks(),
        deadline: world.now + Duration::from_secs(10),
        hold: Blocks::held(&world.are_free),
    };
    world.sides[0].0.get(&world.peer(), request).unwrap()
}

fn get(world: &mut World) -> GetOutcome {
    let mut get = begin_get(world);
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

/// KV that a device computes into free blocks.
fn computes(world: &World, side: usize) {
    let kv = vec![0; world.pools[side].bytes()];
    world.pools[side].write_by(Instant::now() + PATIENCE, 0, &kv).unwrap();
}

/// What a NIC has stored by now in a pool of zeros.
fn has_come(world: &World, side: usize) -> Option<()> {
    let stored = world.reached[side].read(0, world.pools[side].bytes());
    stored.iter().any(|byte| *byte != 0).then_some(())
}

fn are_free(world: &World) -> Option<()> {
    world.are_free.load(Relaxed).then_some(())
}

/// KV of a put that was given up, in blocks that were used again since.
fn appears_after_a_put(hazard: Option<Hazard>) -> usize {
    let mut world = World::new(hazard);
    let put = begin_put(&mut world);
    launch(&put, 0..1);
    world.until(|world| has_come(world, 1));
    assert!(are_free(&world).is_none());
    put.abort("no longer wanted");
    world.until(are_free);
    computes(&world, 1);
    world.pools[1].show_remote_writes().unwrap();
    moved(&world.seen(1))
}

/// The same of a get.
fn appears_after_a_get(hazard: Option<Hazard>) -> usize {
    let mut world = World::new(hazard);
    let get = begin_get(&mut world);
    world.until(|world| has_come(world, 0));
    assert!(are_free(&world).is_none());
    get.abort("no longer wanted");
    world.until(are_free);
    computes(&world, 0);
    world.pools[0].show_remote_writes().unwrap();
    moved(&world.seen(0))
}

#[test]
fn without_the_guard_what_was_given_up_appears_in_blocks_that_are_used_again() {
    assert!(appears_after_a_put(Some(Hazard::UnseenWrites)) > 0);
    assert!(appears_after_a_get(Some(Hazard::UnseenWrites)) > 0);
}

#[test]
fn what_was_given_up_does_not_appear_in_blocks_that_are_used_again() {
    assert_eq!(appears_after_a_put(None), 0);
    assert_eq!(appears_after_a_get(None), 0);
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
