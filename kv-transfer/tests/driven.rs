//! Two services in one thread under virtual time, as a simulation drives them: a transport of two queues, checksums compared and the worker
//! asked at once. The same seed gives the same run.

use baton_kv_transfer::simulation::*;
use baton_kv_transfer::*;
use baton_memory::HostPool;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// The only connection, from the first side to the second.
const CONN: ConnId = ConnId(1);
const TOKENS: u32 = 70;
const BLOCKS: [u32; 5] = [7, 2, 3, 0, 5];

enum Frame {
    Connect,
    Message(Vec<u8>),
    Put { ticket: TicketId, to: usize, bytes: Vec<u8> },
    Flush(u64),
    Flushed(u64),
}

/// What is on its way to each side, and a log of what came.
#[derive(Default)]
struct Wire {
    to: [VecDeque<Frame>; 2],
    log: Vec<(usize, Duration, &'static str)>,
}

struct Simulated {
    side: usize,
    wire: Rc<RefCell<Wire>>,
    region: Arc<HostPool>,
    windows: BTreeMap<TicketId, Window>,
    done: Vec<Event>,
    draw: Draw,
    begin: Instant,
}

impl Simulated {
    fn post(&self, frame: Frame) {
        self.wire.borrow_mut().to[1 - self.side].push_back(frame);
    }
}

impl Transport for Simulated {
    fn name(&self) -> &'static str {
        "simulated"
    }
    fn address(&self) -> TransferAddress {
        TransferAddress::Tcp(([127, 0, 0, 1], 1 + self.side as u16).into())
    }
    fn region(&self) -> RemoteRegion {
        RemoteRegion { bytes: self.region.bytes() as u64, ..RemoteRegion::default() }
    }
    fn fences(&self) -> bool {
        true
    }
    fn closing_fences(&self, _: ConnId) -> bool {
        true
    }
    fn connect(&mut self, _: &TransferAddress) -> Result<ConnId, String> {
        self.post(Frame::Connect);
        Ok(CONN)
    }
    fn greeted(&mut self, _: ConnId, _: &RemoteRegion, _: usize) -> Result<(), String> {
        Ok(())
    }
    fn send(&mut self, _: ConnId, message: Vec<u8>) {
        self.post(Frame::Message(message));
    }
    fn put(&mut self, conn: ConnId, ticket: TicketId, run: CopyRun) {
        let mut bytes = vec![0; run.len];
        self.region.copy_out(run.from, &mut bytes);
        self.post(Frame::Put { ticket, to: run.to, bytes });
        self.done.push(Event::PutDone(conn, run.len));
    }
    fn flush(&mut self, _: ConnId, id: u64) {
        self.post(Frame::Flush(id));
    }
    fn open_window(&mut self, _: ConnId, ticket: TicketId, window: Window) {
        self.windows.insert(ticket, window);
    }
    fn close_window(&mut self, conn: ConnId, ticket: TicketId) {
        self.windows.remove(&ticket);
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
        "queues".into()
    }
    /// Takes in one to four frames.
    fn progress(&mut self, now: Instant, events: &mut Vec<Event>) -> bool {
        events.append(&mut self.done);
        for _ in 0..=self.draw.next() % 4 {
            let Some(frame) = self.wire.borrow_mut().to[self.side].pop_front() else { break };
            let (event, name) = match frame {
                Frame::Connect => (Some(Event::Accepted { conn: CONN, proven: false }), "connect"),
                Frame::Message(bytes) => (Some(Event::Message(CONN, bytes)), "message"),
                Frame::Put { ticket, to, bytes } => {
                    let window = self.windows.get(&ticket).expect("no write without a grant");
                    assert!(window.allows(&(to..to + bytes.len())));
                    self.region.copy_in(to, &bytes);
                    (None, "put")
                }
                Frame::Flush(id) => {
                    self.post(Frame::Flushed(id));
                    (None, "flush")
                }
                Frame::Flushed(id) => (Some(Event::Flushed(CONN, id)), "flushed"),
            };
            events.extend(event);
            self.wire.borrow_mut().log.push((self.side, now - self.begin, name));
        }
        false
    }
    fn shutdown(&mut self, _: Instant, events: &mut Vec<Event>) {
        events.push(Event::Closed {
            conn: CONN,
            reason: "the end".into(),
            fenced: true,
            draining: false,
            unproven: false,
        });
    }
}

#[derive(Clone)]
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 20
    }
}

/// Compares at once.
struct Compare(Arc<HostPool>, KvPoolMap);

impl Verifier for Compare {
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
#[derive(Default)]
struct Worker(Mutex<Vec<TokenId>>);

impl SinkHandler for Worker {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.grant(Box::new(Blocks(blocks())));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        *self.0.lock().unwrap() = handoff.tokens;
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
    fn pin(&self, _: PinQuestion, reply: PinReply) {
        reply.pin(blocks(), Box::new(()));
    }
}

struct Side {
    transfer: KvTransfer,
    driver: Driver,
    region: Arc<HostPool>,
    worker: Arc<Worker>,
}

impl Side {
    fn new(side: usize, seed: u64, wire: &Rc<RefCell<Wire>>, begin: Instant) -> Self {
        let layout = KvLayout::llama(16, 2, 2, 8, Dtype::Bf16).unwrap();
        let map = KvPoolMap::try_new(layout.clone(), 8).unwrap();
        let class =
            NumericsClass { order: "t".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
        let compatibility = Compatibility { model: Digest([0; 32]), layout, class };
        let choice = TransportChoice::tcp([127, 0, 0, 1].into());
        let config = TransferConfig::new(party(side), compatibility, map.clone(), choice);
        let (region, worker) = (HostPool::new(map.bytes()).unwrap(), Arc::<Worker>::default());
        let mut draw = Draw(seed + side as u64);
        let transport = Simulated {
            side,
            wire: wire.clone(),
            region: region.clone(),
            windows: BTreeMap::new(),
            done: Vec::new(),
            draw: draw.clone(),
            begin,
        };
        let ports = Ports {
            transport: Box::new(transport),
            wake: Box::new(|| {}),
            verifier: Box::new(Compare(region.clone(), map)),
            calls: Box::new(Inline(worker.clone())),
            draw: Box::new(move || draw.next()),
        };
        let (transfer, driver) = KvTransfer::drive(config, ports).unwrap();
        Self { transfer, driver, region, worker }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.bytes()];
        self.region.copy_out(0, &mut bytes);
        bytes
    }
}

fn party(side: usize) -> Party {
    Party { instance: InstanceId::try_new(["p", "d"][side]).unwrap(), incarnation: Incarnation(1) }
}

/// Turns both until the outcome is there; its time.
fn run<T>(sides: &mut [Side; 2], now: &mut Instant, outcome: impl Future<Output = T>) -> T {
    let mut outcome = pin!(outcome);
    for _ in 0..10_000 {
        if let Poll::Ready(outcome) = outcome.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return outcome;
        }
        let turns = sides.each_mut().map(|side| side.driver.turn(*now));
        if !turns.iter().any(|turn| turn.worked) {
            *now = turns.iter().map(|turn| turn.wake_at).min().unwrap().max(*now + Duration::from_micros(1));
        }
    }
    panic!("it never ends");
}

/// A put, and a get of the same back into other blocks; the log of it.
fn put_and_get(seed: u64) -> Vec<(usize, Duration, &'static str)> {
    let (wire, begin) = (Rc::<RefCell<Wire>>::default(), Instant::now());
    let mut sides = [0, 1].map(|side| Side::new(side, seed, &wire, begin));
    let (mut now, noise) = (begin, Draw(99));
    let noise: Vec<u8> = std::iter::repeat_with({
        let mut noise = noise;
        move || noise.next() as u8
    })
    .take(sides[0].region.bytes())
    .collect();
    sides[0].region.copy_in(0, &noise);

    let sink = Peer { party: party(1), address: sides[1].transfer.address(), shard: 0 };
    let (request_id, deadline) = (RequestId::try_new("r").unwrap(), begin + Duration::from_secs(10));
    let request =
        PutRequest { request_id: request_id.clone(), tokens: TOKENS, blocks: blocks(), deadline, hold: Box::new(()) };
    let mut put = sides[0].transfer.put(&sink, request).unwrap();
    let fence: Fence = Arc::new(AlreadyDone);
    [0, 1].iter().for_each(|layer| put.layer_launched(*layer, TOKENS as usize, &fence));
    let tokens: Vec<TokenId> = (0..=TOKENS).collect();
    put.finish(CommitPayload { tokens: tokens.clone(), prompt_len: TOKENS, extra: Vec::new() });
    let report = run(&mut sides, &mut now, put.outcome()).unwrap();
    assert_eq!(report.bytes, u64::from(TOKENS) * 2 * 2 * 2 * 8 * 2);
    assert_eq!(*sides[1].worker.0.lock().unwrap(), tokens);

    // What was put comes back.
    sides[0].region.copy_in(0, &vec![0; noise.len()]);
    let request = GetRequest {
        request_id,
        name: vec![1],
        from: 0,
        tokens: TOKENS,
        blocks: blocks(),
        deadline,
        hold: Box::new(Blocks(blocks())),
    };
    let mut get = sides[0].transfer.get(&sink, request).unwrap();
    run(&mut sides, &mut now, get.outcome()).unwrap();
    assert!(sides[0].bytes() == sides[1].bytes());
    assert!(sides[0].bytes().iter().zip(&noise).filter(|(got, put)| got == put).count() >= report.bytes as usize);

    sides.iter_mut().for_each(|side| side.driver.finish(now, now));
    wire.take().log
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..20 {
        assert_eq!(put_and_get(seed), put_and_get(seed));
    }
    assert_ne!(put_and_get(1), put_and_get(2));
}
