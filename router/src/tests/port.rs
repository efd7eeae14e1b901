//! The core without servers: workers behind the port, in one thread, with a clock that advances only while all tasks
//! wait.

use crate::port::{CallError, ConnectError, Connector, DecodeCall, Link, PrefillCall, WorkerEvents, WorkerReport};
use crate::testing::record;
use crate::{Core, Event, Outside, Parameters, Prompt, Request, RouterConfig, Segment};
use baton_node::membership::{Member, MembershipView, Registration, RouterMembership};
use baton_node::metrics::Metrics;
use baton_node::telemetry::{TraceId, Traces};
use baton_types::{
    Clock, DecodeEvent, Digest, ErrorKind, FinishReason, GeneratedToken, InstanceRecord, LoadReport, Party,
    PrefillEvent, RequestError, RequestId, Role, Runtime, SequenceSpec, TenantId, Weight,
};
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, poll, stream};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

/// A clock that a test advances; the tasks are the test's own.
#[derive(Debug)]
struct Held(Mutex<State>);

#[derive(Debug)]
struct State {
    now: Instant,
    drawn: u64,
    timers: BTreeMap<(Instant, u64), oneshot::Sender<()>>,
}

impl Clock for Held {
    fn now(&self) -> Instant {
        self.0.lock().now
    }
}

impl Runtime for Held {
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        let (timer, ends) = oneshot::channel();
        let number = self.random();
        self.0.lock().timers.insert((at, number), timer);
        ends.map(drop).boxed()
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        tokio::spawn(task);
    }

    fn random(&self) -> u64 {
        let mut state = self.0.lock();
        state.drawn += 1;
        state.drawn
    }
}

impl Held {
    /// The result of `work`. The clock advances once all tasks wait.
    async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            // More rounds than tasks need to pass messages to each other.
            for _ in 0..64 {
                if let Poll::Ready(done) = poll!(work.as_mut()) {
                    return done;
                }
                tokio::task::yield_now().await;
            }
            let mut state = self.0.lock();
            let ((at, _), timer) = state.timers.pop_first().expect("somebody waits for a time");
            if timer.send(()).is_ok() {
                state.now = state.now.max(at);
            }
        }
    }
}

/// Decode workers, of which the first one called is lost after two tokens.
#[derive(Clone, Debug)]
struct Workers {
    runtime: Arc<Held>,
    calls: Arc<Mutex<Vec<(Party, SequenceSpec)>>>,
}

#[derive(Debug)]
struct Worker(Workers, Party);

impl Connector for Workers {
    fn connect(&self, record: &InstanceRecord) -> Result<Box<dyn Link>, ConnectError> {
        Ok(Box::new(Worker(self.clone(), record.party.clone())))
    }
}

fn token(id: u32, finish: Option<FinishReason>) -> Result<DecodeEvent, CallError> {
    Ok(DecodeEvent::Token(GeneratedToken { id, finish, ..GeneratedToken::default() }))
}

fn lost() -> CallError {
    CallError::Lost(RequestError::new(ErrorKind::Unavailable, "it went away"))
}

impl Link for Worker {
    fn decode(&self, call: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>> {
        let mut calls = self.0.calls.lock();
        calls.push((self.1.clone(), call.sequence));
        let rest = match calls.len() {
            1 => [token(11, None), token(12, None), Err(lost())],
            _ => [token(13, None), token(14, None), token(15, Some(FinishReason::Length))],
        };
        let events = stream::iter([Ok(DecodeEvent::Claimed)].into_iter().chain(rest)).boxed();
        async { Ok(events) }.boxed()
    }

    fn prefill(&self, _: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>> {
        async { Err(lost()) }.boxed()
    }

    fn watch(&self, _: &str, _: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>> {
        let blocks = baton_types::BlockCounts { total: 512, free: 512, ..Default::default() };
        let report = LoadReport { healthy: true, blocks: Some(blocks), ..LoadReport::default() };
        let reports = stream::unfold((self.0.runtime.clone(), Duration::ZERO), move |(runtime, wait)| {
            let report = WorkerReport::Load(report.clone());
            async move {
                (&*runtime as &dyn Runtime).sleep(wait).await;
                Some((Ok(report), (runtime, Duration::from_millis(500))))
            }
        });
        async { Ok(reports.boxed()) }.boxed()
    }

    fn bundle(&self, _: Digest, _: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>> {
        async { Err(lost()) }.boxed()
    }

    fn keep(&self, _: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>> {
        async { Ok(()) }.boxed()
    }
}

/// A membership that never changes.
struct Members(watch::Sender<Arc<MembershipView>>);

impl RouterMembership for Members {
    fn view(&self) -> watch::Receiver<Arc<MembershipView>> {
        self.0.subscribe()
    }

    fn admit(&self, _: &Party) -> bool {
        true
    }

    fn evict(&self, _: &Party, _: &str) -> bool {
        true
    }
}

#[tokio::test]
async fn an_answer_goes_on_at_another_worker_after_one_is_lost() {
    let state = State { now: Instant::now(), drawn: 0, timers: BTreeMap::new() };
    let runtime = Arc::new(Held(Mutex::new(state)));
    let workers = Workers { runtime: runtime.clone(), calls: Arc::default() };
    let members = ["d0", "d1"].map(|name| {
        let record = Arc::new(record(Role::Decode, name));
        let registration = Registration { incarnation: record.party.incarnation, revision: 1 };
        (record.party.instance.clone(), Member { record, registration })
    });
    let view = MembershipView { members: members.into(), revision: 1 };
    let outside = Outside {
        runtime: runtime.clone(),
        connector: Arc::new(workers.clone()),
        membership: Arc::new(Members(watch::Sender::new(Arc::new(view)))),
        traces: Traces::default(),
        name: "router".into(),
        index_secret: [1, 2],
        stop: CancellationToken::new(),
    };
    let core = Core::start(&RouterConfig::default(), outside, &Metrics::new("baton-router"));
    let received = runtime.now();
    let mut parameters = Parameters { model: "m".into(), ..Parameters::default() };
    parameters.sampling.max_tokens = Some(5);
    let (id, deadline) = (RequestId::try_new("r").unwrap(), received + Duration::from_secs(60));
    let weight = Weight::try_new(7).unwrap();
    let request = Request::new(id, TenantId::default(), received, deadline, parameters).with_weight(weight);
    let share = request.share();
    let prompt = Prompt::Segments(vec![Segment::Tokens((3..23).collect())]);
    let answer = async {
        while core.workers.ready(runtime.now()).len() < 2 {
            tokio::task::yield_now().await;
        }
        core.generate(request, prompt, &http::HeaderMap::new()).await.unwrap().events.collect::<Vec<_>>().await
    };
    let events: Vec<Event> = runtime.run(answer).await.into_iter().map(Result::unwrap).collect();
    let tokens = events.iter().filter_map(|event| match event {
        Event::Delta(delta) => Some(delta.token_ids.clone()),
        Event::Finished(_) => None,
    });
    assert_eq!(tokens.flatten().collect::<Vec<_>>(), [11, 12, 13, 14, 15]);
    let Some(Event::Finished(finished)) = events.last() else { panic!("no end: {events:?}") };
    assert_eq!((finished.reason, finished.total.as_ref().unwrap().usage.completion_tokens), (FinishReason::Length, 5));
    let calls = workers.calls.lock().clone();
    let [(first, _), (second, sequence)] = &calls[..] else { panic!("{calls:?}") };
    assert_ne!(first, second, "who was lost is avoided");
    assert_eq!((sequence.share, share.weight), (share, weight), "workers are told whose it is");
    assert_eq!((sequence.prompt_len, &sequence.tokens[20..]), (20, &[11, 12][..]), "it goes on behind what was sent");
    runtime.run(core.drain()).await;
    assert_eq!(core.requests(), 0);
    assert!(runtime.now() < deadline);
}
