//! Clients of every kind, whose correct answers are known in advance.

use super::client::{Ask, Shared, channel};
use super::judge::Judge;
use super::sight::Flight;
use crate::load::{Case, Known, undisturbed};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Pause of a client after a failed request.
const PAUSE: Duration = Duration::from_millis(500);

/// The state of the clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Ask,
    Wait,
    Leave,
}

/// Running clients.
pub struct Load {
    shared: Arc<Shared>,
    mood: watch::Sender<Mood>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Requests the undisturbed answers, then starts this many clients.
    pub async fn start(
        routers: &[String],
        cases: &[Case],
        clients: usize,
        judge: Arc<Judge>,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let routers = routers.iter().map(|url| channel(url)).collect::<anyhow::Result<Vec<_>>>()?;
        let known = undisturbed(&routers[0], cases).await?;
        let (flights, next) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { routers, known, judge, flights, next, seed });
        let mood = watch::Sender::new(Mood::Ask);
        let clients = (0..clients).map(|_| tokio::spawn(client(shared.clone(), mood.subscribe()))).collect();
        Ok(Self { shared, mood, clients })
    }

    /// Running requests.
    pub fn flights(&self) -> Vec<Flight> {
        self.shared.flights.lock().values().copied().collect()
    }

    /// The shortest greedy requests.
    pub(super) fn shortest(&self) -> Vec<Known> {
        let greedy = || self.shared.known.iter().filter(|known| !known.case.drawn && known.case.samples == 1);
        let tokens = |known: &Known| known.case.prompt + known.case.answer;
        let shortest = greedy().map(tokens).min();
        greedy().filter(|known| Some(tokens(known)) == shortest).cloned().collect()
    }

    /// Waits for running requests to end, and starts none.
    pub async fn pause(&self) {
        self.mood.send_replace(Mood::Wait);
        while !self.shared.flights.lock().is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Resumes the clients.
    pub fn resume(&self) {
        self.mood.send_replace(Mood::Ask);
    }

    /// Waits for running requests to end, and stops the clients.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.mood.send_replace(Mood::Leave);
        for client in self.clients {
            client.await?;
        }
        Ok(())
    }
}

async fn client(shared: Arc<Shared>, mut mood: watch::Receiver<Mood>) {
    loop {
        let Ok(Mood::Ask) = mood.wait_for(|mood| *mood != Mood::Wait).await.map(|mood| *mood) else { return };
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let ask = Ask::drawn(shared.seed, number, &shared.known);
        if !shared.one(number, &ask).await {
            sleep(PAUSE).await;
        }
    }
}
