//! One request, as a client behind a load balancer sends it: retried on another router if one disconnects, and later if one is full.

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

/// Deadline of requests that have one: far beyond the delay of any fault.
const DEADLINE: Duration = Duration::from_secs(40);
/// A request without an answer or an error after this time counts as endless.
const END_MAX: Duration = Duration::from_secs(60);
/// Longest retry delay that a client accepts from a full router.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3);
/// Attempts of a client at routers that are full or disconnect.
const ASKS_MAX: u32 = 6;
/// A slow reader's pause after each message, and the number of messages after which it reads at full speed.
const SLOW: (Duration, usize) = (Duration::from_millis(60), 20);
/// Keep-alive with which clients detect a hung router.
const PROBE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(3));

/// How an answer is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    Prompt,
    Slow,
    /// The client disconnects after this many tokens.
    Leaves(usize),
}

/// One request, derived from its number and the seed.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    name: String,
    case: usize,
    /// Number of the first router to try.
    router: usize,
    policy: PrefillPolicy,
    priority: i32,
    deadline: Option<Duration>,
    reading: Reading,
}

impl Ask {
    /// A random request.
    pub(super) fn drawn(seed: u64, number: u64, known: &[Known]) -> Self {
        // Multiplying by the golden ratio spreads neighbouring numbers.
        let mut random = StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let case = random.random_range(0..known.len());
        let reading = match random.random_range(0..10) {
            0 => Reading::Leaves(random.random_range(0..known[case].answer.iter().map(Vec::len).sum())),
            1 => Reading::Slow,
            _ => Reading::Prompt,
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
            reading,
        }
    }
}

/// State shared by all clients.
pub(super) struct Shared {
    pub(super) routers: Vec<Channel>,
    pub(super) known: Vec<Known>,
    pub(super) judge: Arc<Judge>,
    pub(super) flights: Mutex<BTreeMap<u64, Flight>>,
    pub(super) next: AtomicU64,
    pub(super) seed: u64,
}

/// A channel to a router, with keep-alive to detect a hang.
pub(super) fn channel(url: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(url.to_owned())?.connect_timeout(PROBE.0);
    Ok(endpoint.http2_keep_alive_interval(PROBE.0).keep_alive_timeout(PROBE.1).connect_lazy())
}

/// How one try ended.
enum Tried {
    Ended(End),
    /// The router disconnected, or refused before it began the request: a short name, and the details.
    Elsewhere(String, String),
    /// The router is full.
    Later(Duration, String),
}

impl Shared {
    /// Sends the request and reports its end to the judge. Returns whether it succeeded.
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

    /// The request's name in reports.
    fn name(&self, ask: &Ask) -> String {
        format!("{} ({:?}, {:?}, {:?})", ask.name, self.known[ask.case].case, ask.policy, ask.reading)
    }

    /// Behaves like a client behind a load balancer: tries another router if one disconnects or cannot serve now, and waits if it is
    /// full.
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
        if ask.reading == Reading::Leaves(0) {
            // Cancels at some moment before the first token, unless the request ends earlier.
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
                // HTTP/2 resets can make a stream look ended: without trailers there is no status.
                Ok(None) => {
                    let why = format!("after {} tokens: the stream ended without a status", answer.count());
                    return Tried::Elsewhere("no status".into(), why);
                }
                Err(status) => return tried(&status, answer.count()),
            }
            match ask.reading {
                Reading::Leaves(after) if answer.count() >= after => return Tried::Ended(End::Cancelled),
                Reading::Slow if messages <= SLOW.1 => sleep(SLOW.0).await,
                _ => {}
            }
        }
    }
}

fn tried(status: &Status, tokens: usize) -> Tried {
    let why = format!("after {tokens} tokens: {:?}: {}", status.code(), status.message());
    match stated_error(status) {
        // The status is not from the router: it has disconnected.
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
