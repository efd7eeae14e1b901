//! Clients of every kind, each of whose answers is known beforehand.

use super::client::{Ask, Shared, channel};
use super::judge::Judge;
use super::sight::Flight;
use super::stage::Node;
use crate::load::{Case, undisturbed};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// A client that was failed does not ask again before.
const PAUSE: Duration = Duration::from_millis(500);

/// Short requests at a time that give every pair of workers its handoff, while somebody waits for that.
const PROBERS: usize = 4;
/// And more of them, while somebody waits for long: a worker that was last measured slow gets requests when the others are full.
const PUSHERS: usize = 12;

/// Who asks when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Always.
    Client,
    /// While somebody waits for handoffs of every pair.
    Prober,
    /// While somebody waits for long.
    Pusher,
}

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
    /// More of them, and nobody else begins a request meanwhile.
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
        let right = undisturbed(&routers[0], cases).await?;
        let (flights, next) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { routers, right, judge, flights, next, seed });
        let orders = watch::Sender::new(Orders { mood: Mood::Ask, watchers: 0, hurried: 0 });
        let roles = [(Role::Client, clients), (Role::Prober, PROBERS), (Role::Pusher, PUSHERS)];
        let roles = roles.into_iter().flat_map(|(role, n)| std::iter::repeat_n(role, n));
        let clients = roles.map(|role| tokio::spawn(client(shared.clone(), orders.subscribe(), role))).collect();
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

async fn client(shared: Arc<Shared>, mut orders: watch::Receiver<Orders>, role: Role) {
    let acts = |orders: &Orders| match orders.mood {
        Mood::Ask => match role {
            Role::Client => orders.hurried == 0,
            Role::Prober => orders.watchers > 0,
            Role::Pusher => orders.hurried > 0,
        },
        Mood::Wait => false,
        Mood::Leave => true,
    };
    loop {
        let Ok(mood) = orders.wait_for(acts).await.map(|orders| orders.mood) else { return };
        if mood == Mood::Leave {
            return;
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let ask = if role == Role::Client {
            Ask::drawn(shared.seed, number, &shared.right)
        } else {
            let mut probe = Ask::probe(number, &shared.right);
            if shared.judge.is_touched(Node::Router(probe.router)) {
                probe.router = 1 - probe.router;
            }
            probe
        };
        if !shared.one(number, &ask).await {
            sleep(PAUSE).await;
        }
    }
}
