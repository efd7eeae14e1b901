//! One request, as a client behind a load balancer sends it: again to another router where one goes away, later where one is full.

use super::judge::{End, Ended, Judge, Try};
use super::sight::Flight;
use super::stage::Node;
use crate::load::{Answer, Known};
use baton_proto::convert::status::stated_error;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, PrefillPolicy};
use baton_types::ErrorKind;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Deadline of those that have one: far beyond what a fault may cost.
const DEADLINE: Duration = Duration::from_secs(40);
/// A request without an answer or an error for so long has no end.
const END_MAX: Duration = Duration::from_secs(60);
/// Longest wait that a client takes from a router that is full.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3);
/// Times that a client asks a router which is full, or which goes away.
const ASKS_MAX: u32 = 6;
/// A slow reader's pause after each message, and after how many of them it reads on at once.
const SLOW: (Duration, usize) = (Duration::from_millis(60), 20);
/// How clients find out that a router hangs.
const PROBE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(3));

/// How an answer is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Prompt,
    Slow,
    /// Until so many tokens came.
    Leaves(usize),
}

/// One request, as its number and the seed give it.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    name: String,
    case: usize,
    /// Number of the router that is asked first.
    router: usize,
    policy: PrefillPolicy,
    priority: i32,
    deadline: Option<Duration>,
    manner: Manner,
}

impl Ask {
    /// Any.
    pub(super) fn drawn(seed: u64, number: u64, known: &[Known]) -> Self {
        // The golden ratio's bits tell neighbouring numbers apart.
        let mut random = StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let case = random.random_range(0..known.len());
        let manner = match random.random_range(0..10) {
            0 => Manner::Leaves(random.random_range(0..known[case].answer.iter().map(Vec::len).sum())),
            1 => Manner::Slow,
            _ => Manner::Prompt,
        };
        let policy = match random.random_range(0..8) {
            0..4 => PrefillPolicy::Remote,
            4..6 => PrefillPolicy::Auto,
            _ => PrefillPolicy::Local,
        };
        Self {
            name: format!("request {number}"),
            case,
            router: random.random_range(0..2),
            policy,
            priority: [-10, 0, 0, 0, 10][random.random_range(0..5)],
            deadline: random.random_bool(0.5).then_some(DEADLINE),
            manner,
        }
    }
}

/// What all clients share.
pub(super) struct Shared {
    pub(super) routers: Vec<Channel>,
    pub(super) known: Vec<Known>,
    pub(super) judge: Arc<Judge>,
    pub(super) flights: Mutex<BTreeMap<u64, Flight>>,
    pub(super) next: AtomicU64,
    pub(super) seed: u64,
}

/// A channel to a router, which notices when that hangs.
pub(super) fn channel(url: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(url.to_owned())?.connect_timeout(PROBE.0);
    Ok(endpoint.http2_keep_alive_interval(PROBE.0).keep_alive_timeout(PROBE.1).connect_lazy())
}

/// How one try ended.
enum Tried {
    Ended(End),
    /// The router went away, or refused what it may not have begun: what it is called, and in words.
    Elsewhere(String, String),
    /// The router is full.
    Later(Duration, String),
}

impl Shared {
    /// Sends it and tells the judge how it ended; whether it did well.
    pub(super) async fn one(&self, number: u64, ask: &Ask) -> bool {
        let sent = Instant::now();
        let mut resent = 0;
        let end = timeout(END_MAX, self.tries(number, ask, sent, &mut resent)).await.unwrap_or(End::Endless);
        self.flights.lock().remove(&number);
        let remote = ask.policy == PrefillPolicy::Remote;
        let well = matches!(end, End::Right | End::Cancelled);
        self.judge.ended(Ended { name: self.name(ask), sent, remote, resent, end });
        well
    }

    /// How a person would look it up.
    fn name(&self, ask: &Ask) -> String {
        format!("{} ({:?}, {:?}, {:?})", ask.name, self.known[ask.case].case, ask.policy, ask.manner)
    }

    /// As a client does behind a load balancer: another router where one goes away or cannot serve now, a wait where it is full.
    async fn tries(&self, number: u64, ask: &Ask, sent: Instant, resent: &mut u32) -> End {
        let (mut router, mut refused) = (ask.router, 0);
        loop {
            let from = Instant::now();
            let last = match self.once(number, ask, router, sent).await {
                Tried::Ended(end) => return end,
                Tried::Elsewhere(what, why) => {
                    let (asked, remote) = (Node::Router(router), ask.policy == PrefillPolicy::Remote);
                    self.judge.turned_away(Try { name: self.name(ask), router: asked, remote, from }, &what, &why);
                    router = (router + 1) % self.routers.len();
                    why
                }
                Tried::Later(wait, why) => {
                    self.judge.put_off();
                    sleep(wait).await;
                    why
                }
            };
            refused += 1;
            if refused == ASKS_MAX {
                return End::Failed(last);
            }
            *resent += 1;
        }
    }

    async fn once(&self, number: u64, ask: &Ask, router: usize, sent: Instant) -> Tried {
        let flight = Flight { router, tokens: 0, policy: ask.policy };
        self.flights.lock().insert(number, flight);
        let message = GenerateRequest {
            prefill_policy: ask.policy.into(),
            priority: ask.priority,
            request_id: ask.name.replace(' ', "-"),
            ..self.known[ask.case].request()
        };
        let mut call = Request::new(message);
        if let Some(deadline) = ask.deadline {
            call.set_timeout(deadline.saturating_sub(sent.elapsed()));
        }
        let reads = self.reads(number, ask, router, call);
        if ask.manner == Manner::Leaves(0) {
            // Gone at some moment before the first token, unless the router was done with it by then.
            let early = Duration::from_millis(number % 400);
            return timeout(early, reads).await.unwrap_or(Tried::Ended(End::Cancelled));
        }
        reads.await
    }

    async fn reads(&self, number: u64, ask: &Ask, router: usize, call: Request<GenerateRequest>) -> Tried {
        let Known { case, answer: right, .. } = &self.known[ask.case];
        let mut stream = match InferenceClient::new(self.routers[router].clone()).generate(call).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return tried(&status, 0),
        };
        let (mut answer, mut messages) = (Answer::default(), 0);
        loop {
            match stream.message().await {
                Ok(Some(message)) => {
                    answer.take(&message);
                    if let Err(wrong) = answer.begins(right) {
                        return Tried::Ended(End::Wrong(wrong));
                    }
                    if let Some(flight) = self.flights.lock().get_mut(&number) {
                        flight.tokens = answer.count();
                    }
                    messages += 1;
                }
                Ok(None) if matches!(stream.trailers().await, Ok(Some(_))) => {
                    return Tried::Ended(answer.whole(*case).map_or_else(End::Wrong, |_| End::Right));
                }
                // HTTP/2 resets some streams so that they look ended: without trailers there is no status, good or bad.
                Ok(None) => {
                    let why = format!("after {} tokens: the stream ended without a status", answer.count());
                    return Tried::Elsewhere("no status".into(), why);
                }
                Err(status) => return tried(&status, answer.count()),
            }
            match ask.manner {
                Manner::Leaves(after) if answer.count() >= after => return Tried::Ended(End::Cancelled),
                Manner::Slow if messages <= SLOW.1 => sleep(SLOW.0).await,
                _ => {}
            }
        }
    }
}

fn tried(status: &Status, tokens: usize) -> Tried {
    let why = format!("after {tokens} tokens: {:?}: {}", status.code(), status.message());
    match stated_error(status) {
        // No word of the router's: it is gone.
        None if status.code() != tonic::Code::DeadlineExceeded => {
            Tried::Elsewhere(format!("no word of the router's ({:?})", status.code()), why)
        }
        Some(error) if tokens == 0 && error.kind == ErrorKind::Overloaded => {
            Tried::Later(error.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX), why)
        }
        Some(error) if tokens == 0 && error.kind == ErrorKind::Unavailable => {
            Tried::Elsewhere(error.kind.name().into(), why)
        }
        _ => Tried::Ended(End::Failed(why)),
    }
}
