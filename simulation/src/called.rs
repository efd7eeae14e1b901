//! The calls that routers make for each request, as their links see them, and the limits that these must keep: of attempts, moves, retries,
//! back-off and time.

use crate::client::AtEnd;
use crate::executor::{Executor, Process, Time, ms};
use crate::invariant::Invariant;
use crate::schedule::Fault;
use crate::scheduled::{Scheduled, router_config};
use baton_node::telemetry::TraceId;
use baton_router::RouterConfig;
use baton_router::port::{
    CallError, ConnectError, Connector, DecodeCall, Link, PrefillCall, WorkerEvents, WorkerReport,
};
use baton_types::{BoxFuture, DecodeEvent, Digest, InstanceRecord, PrefillEvent, RequestId, Role, SequenceSpec};
use futures::{FutureExt as _, StreamExt as _, stream};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// A timer that is due, or a stream that closes, is heard of at most so late.
const HEARD_WITHIN: Time = ms(5);

/// A call, from the router's side.
#[derive(Clone, Debug)]
struct Call {
    /// The name of the attempt, which its two calls share.
    attempt: RequestId,
    /// The request's number.
    request: usize,
    sample: u32,
    /// The slot of the router, and its process.
    router: usize,
    process: Process,
    role: Role,
    deadline: Instant,
    priority: i32,
    at: Time,
    /// When the first event came.
    answered: Option<Time>,
    /// When the router let go of it.
    ended: Option<Time>,
    /// The last event said that there is no room for the KV yet.
    waits: bool,
    /// It failed, or its part is over.
    is_over: bool,
}

/// All calls of one schedule. Clones are the same ones.
#[derive(Clone, Default)]
pub struct Called(Arc<Mutex<Vec<Call>>>);

/// Makes links of a router that are watched.
pub struct Watched<C> {
    pub connector: C,
    pub called: Called,
    pub executor: Executor,
    /// The slot of the router, and its process.
    pub router: usize,
    pub process: Process,
}

impl<C> fmt::Debug for Watched<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.router).finish()
    }
}

impl<C: Connector> Connector for Watched<C> {
    fn connect(&self, record: &InstanceRecord) -> Result<Box<dyn Link>, ConnectError> {
        let connector = self.connector.connect(record)?;
        let (called, executor) = (self.called.clone(), self.executor.clone());
        Ok(Box::new(Watched { connector, called, executor, router: self.router, process: self.process }))
    }
}

impl Watched<Box<dyn Link>> {
    /// A call begins.
    fn begins(&self, role: Role, sequence: &SequenceSpec, deadline: Instant) -> Note {
        let name = sequence.request_id.as_str();
        let number = name.trim_start_matches('r').split('.').next().and_then(|number| number.parse().ok());
        let mut called = self.called.0.lock();
        called.push(Call {
            attempt: sequence.request_id.clone(),
            request: number.expect("the name of a client's request"),
            sample: sequence.sample_index,
            router: self.router,
            process: self.process,
            role,
            deadline,
            priority: sequence.priority,
            at: self.executor.time(),
            answered: None,
            ended: None,
            waits: false,
            is_over: false,
        });
        Note { called: self.called.clone(), executor: self.executor.clone(), call: called.len() - 1 }
    }
}

impl Link for Watched<Box<dyn Link>> {
    fn decode(&self, call: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>> {
        let note = self.begins(Role::Decode, &call.sequence, call.deadline);
        let waits = |event: &DecodeEvent| matches!(event, DecodeEvent::Waits);
        watch(self.connector.decode(call), note, waits, |_| false)
    }

    fn prefill(&self, call: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>> {
        let note = self.begins(Role::Prefill, &call.sequence, call.deadline);
        let is_over = |event: &PrefillEvent| matches!(event, PrefillEvent::Done(_));
        watch(self.connector.prefill(call), note, |_| false, is_over)
    }

    fn watch(&self, router: &str, cache: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>> {
        self.connector.watch(router, cache)
    }

    fn bundle(&self, digest: Digest, bytes_max: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>> {
        self.connector.bundle(digest, bytes_max)
    }

    fn keep(&self, traces: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>> {
        self.connector.keep(traces)
    }
}

/// Notes what a router hears of one call. Dropped when the router lets go of it.
struct Note {
    called: Called,
    executor: Executor,
    call: usize,
}

impl Note {
    fn hears(&self, waits: bool, is_over: bool) {
        let now = self.executor.time();
        let call = &mut self.called.0.lock()[self.call];
        call.answered.get_or_insert(now);
        call.waits = waits;
        call.is_over |= is_over;
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let now = self.executor.time();
        self.called.0.lock()[self.call].ended = Some(now);
    }
}

/// The same call, noted.
fn watch<T: Send + 'static>(
    opening: BoxFuture<'static, Result<WorkerEvents<T>, CallError>>,
    note: Note,
    waits: impl Fn(&T) -> bool + Send + 'static,
    is_over: impl Fn(&T) -> bool + Send + 'static,
) -> BoxFuture<'static, Result<WorkerEvents<T>, CallError>> {
    async move {
        let events = match opening.await {
            Ok(events) => events,
            Err(error) => {
                note.hears(false, true);
                return Err(error);
            }
        };
        let events = events.map(Some).chain(stream::iter([None])).map(move |event| {
            match &event {
                Some(Ok(event)) => note.hears(waits(event), is_over(event)),
                Some(Err(_)) | None => note.hears(false, true),
            }
            event
        });
        Ok(events.take_while(|event| std::future::ready(event.is_some())).filter_map(std::future::ready).boxed())
    }
    .boxed()
}

/// Looks at all calls, and notes what exceeded a limit.
pub(crate) fn check(cluster: &Scheduled) {
    let limits = router_config(&cluster.schedule().shape);
    let calls = cluster.called.0.lock().clone();
    let wrong = |what: String| cluster.breaches.add(Invariant::BoundedCalls, what);
    let ends = cluster.ends.all();
    let mut samples: BTreeMap<(Process, usize, u32), Vec<&Call>> = BTreeMap::new();
    for call in &calls {
        times(cluster, call, &ends[call.request], &limits, &wrong);
        if call.role == Role::Decode {
            samples.entry((call.process, call.request, call.sample)).or_default().push(call);
        }
    }
    let drains = cluster.schedule().faults.iter().filter(|(_, fault)| matches!(fault, Fault::Drain { .. })).count();
    let mut retries: BTreeMap<Process, Vec<Time>> = BTreeMap::new();
    for ((process, request, sample), attempts) in &samples {
        let of = format!("request {request}, sample {sample}");
        // An attempt that a drain ended counts not, and a start of a worker drains once.
        let attempts_max = limits.retry.attempts_max as usize + drains;
        if attempts.len() > attempts_max {
            wrong(format!("{of}: {} attempts, {attempts_max} are its bound", attempts.len()));
        }
        let moves = attempts.windows(2).filter(|pair| is_move(pair[0], &calls)).count();
        cluster.counts.lock().add("router: moves", moves as u64);
        if moves > 1 {
            wrong(format!("{of} moved {moves} times from a decode worker without room: {attempts:?}"));
        }
        for pair in attempts.windows(2) {
            let waited = pair[0].ended.map_or(0, |ended| pair[1].at.saturating_sub(ended));
            if waited < ms(limits.retry.backoff_ms_min) / 2 {
                wrong(format!("{of} is tried again after {waited} us: {pair:?}"));
            }
        }
        // A retry is paid for when the attempt before it ends.
        let paid = attempts.windows(2).filter_map(|pair| pair[0].ended);
        retries.entry(*process).or_default().extend(paid);
    }
    for times in retries.values_mut().filter(|_| drains == 0) {
        times.sort_unstable();
        for (before, at) in times.iter().enumerate() {
            let refilled = limits.retry.per_s * (at - times[0]) as f64 / 1e6;
            if before as f64 + 1.0 > f64::from(limits.retry.burst_max) + refilled {
                wrong(format!("{} retries of one router until {at} us: {:?}", before + 1, limits.retry));
            }
        }
    }
}

/// A call has its request's deadline and priority, is answered or given up in time, and is over with its request.
fn times(cluster: &Scheduled, call: &Call, end: &AtEnd, limits: &RouterConfig, wrong: &dyn Fn(String)) {
    let request = &cluster.schedule().requests[call.request];
    if call.deadline != cluster.executor.instant(request.deadline) || call.priority != request.priority {
        wrong(format!("a call has another deadline or priority than its request: {call:?}, {request:?}"));
    }
    let now = cluster.executor.time();
    let claimed_by = call.at + ms(limits.limits.claim_ack_ms_max) + HEARD_WITHIN;
    let claimed = call.answered.or(call.ended).unwrap_or(now);
    if call.role == Role::Decode && claimed > claimed_by && !stands(cluster, call, call.at, claimed_by) {
        wrong(format!("a claim without an answer was held until {claimed} us: {call:?}"));
    }
    let ended = call.ended.unwrap_or(now);
    if let Some((at, end)) = end
        && ended > at + HEARD_WITHIN
        && !stands(cluster, call, at.saturating_sub(HEARD_WITHIN), at + HEARD_WITHIN)
    {
        wrong(format!("a request ended at {at} us, {end:?}, and a call of it at {ended} us: {call:?}"));
    }
}

/// Whether the router of a call stands still from an instant between these on.
fn stands(cluster: &Scheduled, call: &Call, from: Time, to: Time) -> bool {
    let is_in = |(at, fault): &(Time, Fault)| (from..=to).contains(at) && *fault == Fault::Stall { slot: call.router };
    cluster.schedule().faults.iter().any(is_in)
}

/// Whether the router gave an attempt up because there was no room for its KV: nothing else ended it.
fn is_move(attempt: &Call, calls: &[Call]) -> bool {
    let mut both = calls.iter().filter(|call| call.attempt == attempt.attempt);
    attempt.waits && both.all(|call| !call.is_over)
}
