//! Steady load through the service while parts of the cluster stop. Every completed answer must equal the undisturbed one, and failures
//! are counted by reason.

use crate::load::{Answer, Case, Known, undisturbed};
use anyhow::{Context, ensure};
use baton_proto::v1::inference_client::InferenceClient;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

/// Concurrent clients.
const CLIENTS: usize = 3;
/// Longest wait for an answer, including replays.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Reasons that are counted separately.
const REASONS_MAX: usize = 16;
/// How often a request is retried if it was refused before it had an answer.
const AGAIN_MAX: u32 = 10;
/// Pause of a refused client before a retry.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for a client's last answer.
const STOP_MAX: Duration = Duration::from_secs(90);

/// Short and long prompts: the long ones are prefilled on another worker.
pub(crate) const CASES: [Case; 4] =
    [Case::new(40, 24, false), Case::new(300, 12, true), Case::new(90, 16, true), Case::new(340, 8, false)];

/// Counts of the outcomes of requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Complete answers that equal the undisturbed one.
    pub(crate) right: u64,
    /// Other answers, complete or up to where they broke off.
    pub(crate) wrong: Vec<String>,
    /// Requests refused before they had an answer, and retried over a new connection, as clients of a service do.
    pub(crate) moved: u64,
    /// Requests that ended with an error, by its text.
    pub(crate) failed: BTreeMap<String, u64>,
}

/// Running clients.
pub(crate) struct Traffic {
    tally: Arc<Mutex<Tally>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

/// The undisturbed answers, requested once.
pub(crate) async fn known(url: &str) -> anyhow::Result<Vec<Known>> {
    undisturbed(&Endpoint::from_shared(url.to_owned())?.connect_lazy(), &CASES).await
}

impl Traffic {
    /// Starts clients of the router at `url`.
    pub(crate) fn start(url: &str, known: &[Known]) -> anyhow::Result<Self> {
        let (tally, stop) = (Arc::new(Mutex::new(Tally::default())), Arc::new(AtomicBool::new(false)));
        let known: Arc<[Known]> = known.into();
        let client = |number: usize| {
            // A connection is to one router's pod; keep-alive detects the pod's end within seconds, even if no packet shows it.
            let endpoint = Endpoint::from_shared(url.to_owned())?
                .connect_timeout(Duration::from_secs(2))
                .http2_keep_alive_interval(Duration::from_secs(2))
                .keep_alive_timeout(Duration::from_secs(4));
            let (known, tally, stop) = (known.clone(), tally.clone(), stop.clone());
            anyhow::Ok(tokio::spawn(async move {
                let (mut number, mut channel) = (number, endpoint.connect_lazy());
                while !stop.load(Ordering::Relaxed) {
                    let mut left = AGAIN_MAX;
                    while !one(&channel, &known[number % known.len()], &tally, left > 0).await {
                        left -= 1;
                        channel = endpoint.connect_lazy();
                        sleep(PAUSE).await;
                    }
                    number += 1;
                }
            }))
        };
        let clients = (0..CLIENTS).map(client).collect::<Result<_, _>>()?;
        Ok(Self { tally, stop, clients })
    }

    /// The counts so far.
    pub(crate) fn tally(&self) -> Tally {
        self.tally.lock().clone()
    }

    /// Waits for this many more right answers.
    pub(crate) async fn answers(&self, more: u64) -> anyhow::Result<()> {
        let goal = self.tally().right + more;
        let wait = async {
            while self.tally().right < goal {
                sleep(PAUSE).await;
            }
        };
        timeout(STOP_MAX, wait).await.with_context(|| format!("no {more} right answers come: {:?}", self.tally()))
    }

    /// Waits for running requests to end; fails if an answer was wrong.
    pub(crate) async fn stop(self) -> anyhow::Result<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            timeout(STOP_MAX, client).await.context("a client waits on for an answer")??;
        }
        let tally = self.tally.lock().clone();
        ensure!(tally.wrong.is_empty(), "{} answers were wrong: {:#?}", tally.wrong.len(), tally.wrong);
        Ok(tally)
    }
}

/// One request; false if it must be retried, because it was refused before it had an answer.
async fn one(channel: &Channel, known: &Known, tally: &Mutex<Tally>, again: bool) -> bool {
    let mut answer = Answer::default();
    let ended = timeout(ANSWER_MAX, ask(channel, known, &mut answer)).await;
    let count = answer.count();
    // A token that arrives twice, or one that is missing, shifts the following tokens.
    let begins = answer.begins(&known.answer);
    let mut tally = tally.lock();
    if let Err(wrong) = begins {
        tally.wrong.push(format!("{:?}: {wrong}", known.case));
        return true;
    }
    let failure = match ended {
        Ok(Err(status)) if again && count == 0 && status.code() == Code::Unavailable => {
            tally.moved += 1;
            return false;
        }
        Ok(Err(status)) => format!("{:?} after {count} tokens: {}", status.code(), status.message()),
        Err(_) => format!("no end after {count} tokens"),
        Ok(Ok(())) => match answer.whole(known.case) {
            Ok(_) => {
                tally.right += 1;
                return true;
            }
            Err(why) => {
                tally.wrong.push(why);
                return true;
            }
        },
    };
    if tally.failed.len() < REASONS_MAX {
        *tally.failed.entry(failure).or_default() += 1;
    } else {
        *tally.failed.entry("of further reasons".into()).or_default() += 1;
    }
    true
}

async fn ask(channel: &Channel, known: &Known, answer: &mut Answer) -> Result<(), Status> {
    let mut request = Request::new(known.request());
    request.set_timeout(ANSWER_MAX);
    let mut stream = InferenceClient::new(channel.clone()).generate(request).await?.into_inner();
    while let Some(message) = stream.message().await? {
        answer.take(&message);
    }
    Ok(())
}
