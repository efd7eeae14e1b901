//! Clients of every kind, each of whose answers is known beforehand.

use super::judge::{End, Ended, Judge};
use super::sight::Flight;
use super::stage::Node;
use crate::load::{Case, Tokens, ask, request, take};
use anyhow::Context;
use baton_proto::convert::status::stated_error;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, GenerateResponse, PrefillPolicy};
use baton_types::ErrorKind;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;
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
/// A client that was failed does not ask again before.
const PAUSE: Duration = Duration::from_millis(500);
/// A slow reader's pause after each message, and after how many of them it reads on at once.
const SLOW: (Duration, usize) = (Duration::from_millis(60), 20);
/// How clients find out that a router hangs.
const PROBE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(3));

/// Short requests at a time that give every pair of workers its handoff, while somebody waits for that.
const PROBERS: usize = 4;
/// They go first where requests wait.
const PROBE_PRIORITY: i32 = 50;

/// What clients do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Ask,
    Wait,
    Leave,
}

/// What clients are told.
#[derive(Clone, Copy, Debug)]
struct Orders {
    mood: Mood,
    /// Who waits for handoffs of every pair.
    watchers: usize,
    /// Who of them waits for long: everybody else steps back, since requests are placed where there is least to do.
    hurried: usize,
}

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
struct Ask {
    name: String,
    case: usize,
    router: usize,
    policy: PrefillPolicy,
    priority: i32,
    deadline: Option<Duration>,
    manner: Manner,
}

impl Ask {
    fn drawn(seed: u64, number: u64, cases: &[(Case, Tokens)]) -> Self {
        let mut random = StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let case = random.random_range(0..cases.len());
        let manner = match random.random_range(0..10) {
            0 => Manner::Leaves(random.random_range(0..cases[case].1.len())),
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
            priority: *[-10, 0, 0, 0, 10].get(random.random_range(0..5)).unwrap_or(&0),
            deadline: random.random_bool(0.5).then_some(DEADLINE),
            manner,
        }
    }

    /// The shortest, handed over, and of some urgency.
    fn probe(_seed: u64, number: u64, cases: &[(Case, Tokens)]) -> Self {
        let shortest = (0..cases.len()).min_by_key(|i| cases[*i].0.prompt + cases[*i].0.answer);
        Self {
            name: format!("probe {number}"),
            case: shortest.unwrap_or_default(),
            router: (number % 2) as usize,
            policy: PrefillPolicy::Remote,
            priority: PROBE_PRIORITY,
            deadline: Some(DEADLINE),
            manner: Manner::Prompt,
        }
    }
}

/// Clients at work.
pub struct Load {
    shared: Arc<Shared>,
    orders: watch::Sender<Orders>,
    clients: Vec<JoinHandle<()>>,
}

/// While it lives, short requests go to every pair of workers.
pub struct Probing<'a> {
    load: &'a Load,
    hurried: bool,
}

impl Probing<'_> {
    /// Nobody else begins a request meanwhile.
    pub fn hurry(&mut self) {
        if !self.hurried {
            self.hurried = true;
            self.load.orders.send_modify(|orders| orders.hurried += 1);
        }
    }
}

impl Drop for Probing<'_> {
    fn drop(&mut self) {
        self.load.orders.send_modify(|orders| {
            orders.watchers -= 1;
            orders.hurried -= usize::from(self.hurried);
        });
    }
}

struct Shared {
    routers: Vec<Channel>,
    right: Vec<(Case, Tokens)>,
    judge: Arc<Judge>,
    flights: Mutex<BTreeMap<u64, Flight>>,
    next: AtomicU64,
    seed: u64,
}

impl Load {
    /// Asks for the undisturbed answers, then starts so many clients.
    pub async fn start(
        routers: &[String],
        cases: &[Case],
        clients: usize,
        judge: Arc<Judge>,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let routers = routers.iter().map(|url| channel(url)).collect::<anyhow::Result<Vec<_>>>()?;
        let mut right = Vec::new();
        for case in cases {
            let answer = ask(&routers[0], *case).await.map_err(|(status, _)| status);
            right.push((*case, answer.context("the undisturbed answer")?));
        }
        let (flights, next) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { routers, right, judge, flights, next, seed });
        let orders = watch::Sender::new(Orders { mood: Mood::Ask, watchers: 0, hurried: 0 });
        let client = |probes| tokio::spawn(client(shared.clone(), orders.subscribe(), probes));
        let clients = (0..clients).map(|_| client(false)).chain((0..PROBERS).map(|_| client(true))).collect();
        Ok(Self { shared, orders, clients })
    }

    /// Requests that run.
    pub fn flights(&self) -> Vec<Flight> {
        self.shared.flights.lock().values().copied().collect()
    }

    /// Short requests besides those of the clients, until it is dropped.
    pub fn probing(&self) -> Probing<'_> {
        self.orders.send_modify(|orders| orders.watchers += 1);
        Probing { load: self, hurried: false }
    }

    /// Lets what runs end, and nothing begin.
    pub async fn pause(&self) {
        self.orders.send_modify(|orders| orders.mood = Mood::Wait);
        while !self.shared.flights.lock().is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Goes on.
    pub fn resume(&self) {
        self.orders.send_modify(|orders| orders.mood = Mood::Ask);
    }

    /// Lets what runs end, and no client begin again.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.orders.send_modify(|orders| orders.mood = Mood::Leave);
        for client in self.clients {
            client.await?;
        }
        Ok(())
    }
}

fn channel(url: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(url.to_owned())?.connect_timeout(PROBE.0);
    Ok(endpoint.http2_keep_alive_interval(PROBE.0).keep_alive_timeout(PROBE.1).connect_lazy())
}

async fn client(shared: Arc<Shared>, mut orders: watch::Receiver<Orders>, probes: bool) {
    let acts = |orders: &Orders| match orders.mood {
        Mood::Ask if probes => orders.watchers > 0,
        Mood::Ask => orders.hurried == 0,
        Mood::Wait => false,
        Mood::Leave => true,
    };
    loop {
        let Ok(mood) = orders.wait_for(acts).await.map(|orders| orders.mood) else { return };
        if mood == Mood::Leave {
            return;
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let draw = if probes { Ask::probe } else { Ask::drawn };
        let mut ask = draw(shared.seed, number, &shared.right);
        if probes && shared.judge.is_touched(Node::Router(ask.router)) {
            ask.router = 1 - ask.router;
        }
        if !shared.one(number, &ask).await {
            sleep(PAUSE).await;
        }
    }
}

/// How one try ended.
enum Tried {
    Ended(End),
    /// The router went away, or refused what it may not have begun.
    Elsewhere(String),
    /// The router is full.
    Later(Duration, String),
}

impl Shared {
    /// Sends it and tells the judge how it ended; whether it did well.
    async fn one(&self, number: u64, ask: &Ask) -> bool {
        let sent = Instant::now();
        let mut resent = 0;
        let end = timeout(END_MAX, self.tries(number, ask, sent, &mut resent)).await.unwrap_or(End::Endless);
        self.flights.lock().remove(&number);
        let remote = ask.policy == PrefillPolicy::Remote;
        let name = format!("{} ({:?}, {:?}, {:?})", ask.name, self.right[ask.case].0, ask.policy, ask.manner);
        let well = matches!(end, End::Right | End::Cancelled);
        self.judge.ended(Ended { name, sent, remote, resent, end });
        well
    }

    /// As a client does behind a load balancer: another router where one goes away or cannot serve now, a wait where it is full.
    async fn tries(&self, number: u64, ask: &Ask, sent: Instant, resent: &mut u32) -> End {
        let (mut router, mut refused) = (ask.router, 0);
        loop {
            let last = match self.once(number, ask, router, sent).await {
                Tried::Ended(end) => return end,
                Tried::Elsewhere(why) => {
                    router = (router + 1) % self.routers.len();
                    why
                }
                Tried::Later(wait, why) => {
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
        let (case, right) = &self.right[ask.case];
        let flight = Flight { router, tokens: 0, remote: ask.policy != PrefillPolicy::Local };
        self.flights.lock().insert(number, flight);
        let message = GenerateRequest {
            prefill_policy: ask.policy.into(),
            priority: ask.priority,
            request_id: ask.name.replace(' ', "-"),
            ..request(*case)
        };
        let mut call = Request::new(message);
        if let Some(deadline) = ask.deadline {
            call.set_timeout(deadline.saturating_sub(sent.elapsed()));
        }
        if ask.manner == Manner::Leaves(0) {
            // Gone at some moment before the first token.
            let early = Duration::from_millis(number % 400);
            let answer = timeout(early, InferenceClient::new(self.routers[router].clone()).generate(call)).await;
            drop(answer);
            return Tried::Ended(End::Cancelled);
        }
        let mut stream = match InferenceClient::new(self.routers[router].clone()).generate(call).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return tried(&status, 0),
        };
        let (mut tokens, mut messages) = (Tokens::new(), 0);
        loop {
            match stream.message().await {
                Ok(Some(message)) => {
                    if let Err(wrong) = more(&mut tokens, &message, right) {
                        return Tried::Ended(End::Wrong(wrong));
                    }
                    if let Some(flight) = self.flights.lock().get_mut(&number) {
                        flight.tokens = tokens.len();
                    }
                    messages += 1;
                }
                Ok(None) if tokens.len() == right.len() => return Tried::Ended(End::Right),
                Ok(None) => return Tried::Elsewhere(format!("the stream ended after {} tokens", tokens.len())),
                Err(status) => return tried(&status, tokens.len()),
            }
            match ask.manner {
                Manner::Leaves(after) if tokens.len() >= after => return Tried::Ended(End::Cancelled),
                Manner::Slow if messages <= SLOW.1 => sleep(SLOW.0).await,
                _ => {}
            }
        }
    }
}

/// Takes a message, all of whose tokens must be the right ones.
fn more(tokens: &mut Tokens, message: &GenerateResponse, right: &Tokens) -> Result<(), String> {
    take(tokens, message);
    if right.starts_with(tokens) {
        return Ok(());
    }
    let at = tokens.iter().zip(right).take_while(|(got, right)| got == right).count();
    Err(format!("token {at} of {} is {:?}, undisturbed {:?}", right.len(), tokens.get(at), right.get(at)))
}

fn tried(status: &Status, tokens: usize) -> Tried {
    let why = format!("after {tokens} tokens: {:?}: {}", status.code(), status.message());
    match stated_error(status) {
        // No word of the router's: it is gone.
        None if status.code() != tonic::Code::DeadlineExceeded => Tried::Elsewhere(why),
        Some(error) if tokens == 0 && error.kind == ErrorKind::Overloaded => {
            Tried::Later(error.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX), why)
        }
        Some(error) if tokens == 0 && error.kind == ErrorKind::Unavailable => Tried::Elsewhere(why),
        _ => Tried::Ended(End::Failed(why)),
    }
}
