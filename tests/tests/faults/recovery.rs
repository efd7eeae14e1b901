//! Workers that stop in every phase of a request, engines that hang, and processes that are killed: answers go on elsewhere with the very
//! same tokens.

use anyhow::{Context, ensure};
use baton_engine::LogitObserver;
use baton_kv_transfer::HoldPoint;
use baton_node::{DrainConfig, Shutdown};
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{
    GenerateRequest, GenerateResponse, Grammar, PrefillPolicy, Sampling, Segment, TokenIds, grammar, segment::Kind,
};
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::gates::Phase;
use baton_tests::quiet::{QUIET_MAX, until_quiet, until_unreferenced};
use baton_tests::scrape::sum;
use baton_tests::service::Service;
use baton_types::{BlockTables, RequestId};
use baton_worker::config::WorkerConfig;
use baton_worker::process::RunningWorker;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::Channel;

/// A model that computes in no time.
const MODEL: &str = "random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=1024,seed=11";
/// Tokens of a prompt: several chunks and blocks.
const PROMPT_TOKENS: usize = 150;
/// Tokens of an answer.
const ANSWER_TOKENS: u32 = 40;
/// Longest wait for anything that must come.
const WAIT_MAX: Duration = Duration::from_secs(60);

fn quick() -> WorkerConfig {
    let mut config = worker(MODEL);
    config.engine.chunk_tokens_max = 48;
    config
}

/// Token ids and the bits of their log-probabilities.
type Tokens = Vec<(u32, u32)>;

/// How the tokens of an answer are chosen.
#[derive(Clone, Copy, Debug)]
enum How {
    Greedy,
    /// With a seed and all penalties.
    Drawn,
    /// The same, among the tokens that a grammar allows.
    Formed,
}

const HOW: [How; 3] = [How::Greedy, How::Drawn, How::Formed];

/// A form that no answer here comes to the end of, with a state that counts its letters.
const FORM: &str = "([a-y]{3}-[0-9]{2,4} )+[a-z]{900}";

fn sampling(how: How) -> Sampling {
    let common =
        Sampling { max_tokens: Some(ANSWER_TOKENS), ignore_eos: true, logprobs: Some(0), ..Default::default() };
    if let How::Greedy = how {
        return Sampling { temperature: Some(0.0), ..common };
    }
    Sampling {
        ignore_eos: !matches!(how, How::Formed),
        temperature: Some(1.1),
        top_p: Some(0.97),
        presence_penalty: Some(0.4),
        frequency_penalty: Some(0.3),
        repetition_penalty: Some(1.2),
        seed: Some(77),
        ..common
    }
}

fn request(id: &str, how: How, policy: PrefillPolicy) -> GenerateRequest {
    let ids = (0..PROMPT_TOKENS).map(|i| (i * 31 % 251) as u32).collect();
    GenerateRequest {
        prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids })) }],
        sampling: Some(sampling(how)),
        request_id: id.into(),
        prefill_policy: policy.into(),
        grammar: matches!(how, How::Formed).then(|| Grammar { kind: Some(grammar::Kind::Regex(FORM.into())) }),
        // Each goes the whole way: what is held is not to be cached.
        cache_salt: Some(id.into()),
        ..Default::default()
    }
}

fn take(tokens: &mut Tokens, message: &GenerateResponse) {
    let bits = message.logprobs.iter().map(|l| l.chosen.to_bits());
    tokens.extend(message.token_ids.iter().copied().zip(bits));
}

/// Reads the rest of an answer and checks that it counts what the client asked and got.
async fn finish(mut tokens: Tokens, mut stream: Streaming<GenerateResponse>) -> anyhow::Result<Tokens> {
    let mut usage = None;
    while let Some(message) = stream.message().await? {
        take(&mut tokens, &message);
        usage = message.usage.or(usage);
    }
    let usage = usage.context("an end with usage")?;
    let counted = (usage.prompt_tokens as usize, usage.completion_tokens as usize);
    ensure!(counted == (PROMPT_TOKENS, tokens.len()), "{usage:?} for {} tokens", tokens.len());
    Ok(tokens)
}

async fn ask(client: &InferenceClient<Channel>, request: GenerateRequest) -> anyhow::Result<Tokens> {
    finish(Tokens::new(), client.clone().generate(request).await?.into_inner()).await
}

/// Stops a worker within moments, whatever it does.
async fn stop(worker: RunningWorker) {
    let shutdown = Shutdown::new(&DrainConfig { drain_ms_max: 1, ..DrainConfig::default() });
    shutdown.request("the test stops it");
    worker.stop(&shutdown).await;
}

/// Attempts after a failure, as the router counts them.
async fn retries(cluster: &Cluster) -> anyhow::Result<f64> {
    sum(&format!("http://{}/metrics", cluster.router.http_addr), "baton_router_retries_total", &[]).await
}

/// Where a request is held.
#[derive(Clone, Copy, Debug)]
enum Held {
    /// In a phase of an engine, behind so many looks.
    Engine(Phase, u32),
    /// At a point of the transfer.
    Transfer(HoldPoint),
}

/// Stops the worker that serves a request in `phase`; every kind of request must end as if nothing had happened.
async fn a_worker_stops(at: Held, policy: PrefillPolicy, prefill_stops: bool) -> anyhow::Result<()> {
    let mut cluster = Cluster::start(ClusterSpec::new(2, 2, &quick())).await?;
    let client = cluster.client().await?;
    for how in HOW {
        let right = ask(&client, request(&format!("alone-{how:?}"), how, PrefillPolicy::Local)).await?;
        until_quiet(&cluster).await?;
        let id = RequestId::try_new(format!("held-{how:?}"))?;
        let phase = match at {
            Held::Engine(phase, looks) => {
                cluster.gates.hold_later(id.clone(), phase, looks);
                phase
            }
            Held::Transfer(point) => {
                cluster.gates.hold_transfer(id.clone(), point);
                Phase::Transfer
            }
        };
        let (asking, held) = (client.clone(), request(id.as_str(), how, policy));
        let call = tokio::spawn(async move { ask(&asking, held).await });
        let deadline = Instant::now() + WAIT_MAX;
        while !cluster.gates.reached(&id, phase) {
            ensure!(Instant::now() < deadline, "{id} never came to {at:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let pool = if prefill_stops { &mut cluster.prefill } else { &mut cluster.decode };
        let serves = |w: &RunningWorker| {
            let (load, transfer) = (w.loaded.engine.load(), w.transfer.stats());
            load.running + load.waiting + transfer.sinks + transfer.sources > 0
        };
        // Threads publish their counters a turn after a gate stopped them.
        let busy = loop {
            if let Some(busy) = pool.iter().position(serves) {
                break busy;
            }
            ensure!(Instant::now() < deadline, "nobody serves {id}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let stopped = tokio::spawn(stop(pool.remove(busy)));
        // Another worker comes in its place, under another name.
        cluster.add(prefill_stops, &quick(), &format!("another-{how:?}")).await?;
        cluster.gates.open();
        let got = call.await?.with_context(|| format!("{id} at {at:?}, prefill stops: {prefill_stops}"))?;
        ensure!(got == right, "{id} at {at:?}, prefill stops: {prefill_stops}: {got:?}, undisturbed {right:?}");
        stopped.await?;
        until_quiet(&cluster).await?;
    }
    ensure!(retries(&cluster).await? >= 2.0, "{at:?}, prefill stops: {prefill_stops}: nobody noticed");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_stops_in_its_queue_and_in_its_compute() -> anyhow::Result<()> {
    a_worker_stops(Held::Engine(Phase::Queue, 0), PrefillPolicy::Remote, true).await?;
    a_worker_stops(Held::Engine(Phase::Prefill, 1), PrefillPolicy::Remote, true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn either_worker_stops_during_the_transfer() -> anyhow::Result<()> {
    for point in [HoldPoint::Puts, HoldPoint::Commit, HoldPoint::Verify] {
        for prefill_stops in [true, false] {
            a_worker_stops(Held::Transfer(point), PrefillPolicy::Remote, prefill_stops).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_stops_in_mid_answer() -> anyhow::Result<()> {
    a_worker_stops(Held::Engine(Phase::Decode, 30), PrefillPolicy::Remote, false).await?;
    a_worker_stops(Held::Engine(Phase::Decode, 30), PrefillPolicy::Local, false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_stops_that_prefills_itself() -> anyhow::Result<()> {
    a_worker_stops(Held::Engine(Phase::Queue, 0), PrefillPolicy::Local, false).await?;
    a_worker_stops(Held::Engine(Phase::Prefill, 1), PrefillPolicy::Local, false).await
}

/// Makes the engine hang, in the middle of a step, that is the first to come to a position of a request; until its other end is dropped.
struct Hang {
    request: String,
    position: usize,
    released: Mutex<Option<Receiver<()>>>,
}

impl LogitObserver for Hang {
    fn computed(&self, id: &RequestId, position: usize, _: &BlockTables, _: &[f32]) {
        if position == self.position && id.as_str().starts_with(&self.request) {
            let released = self.released.lock().take();
            released.map(|released| released.recv_timeout(2 * WAIT_MAX));
        }
    }
}

/// The engine hangs that computes the token at `position`, while its worker answers on. Answers end elsewhere while it still hangs.
async fn an_engine_hangs(position: usize, policy: PrefillPolicy, prefill_hangs: bool) -> anyhow::Result<()> {
    let mut config = quick();
    // Far above a step of this model, on however busy a machine.
    config.engine.step_ms_max = 3_000;
    let cluster = Cluster::start(ClusterSpec::new(2, 2, &config)).await?;
    let client = cluster.client().await?;
    for how in HOW {
        let right = ask(&client, request(&format!("alone-{how:?}"), how, PrefillPolicy::Local)).await?;
        let id = format!("hangs-{how:?}");
        let (release, released) = channel();
        let hang = Hang { request: id.clone(), position, released: Mutex::new(Some(released)) };
        let hang: Arc<dyn LogitObserver> = Arc::new(hang);
        cluster.workers().for_each(|w| w.loaded.engine.set_logit_observer(Some(hang.clone())));
        let answer = timeout(WAIT_MAX, ask(&client, request(&id, how, policy))).await;
        let got = answer.with_context(|| format!("{id} at {position} waits for an engine that hangs"))??;
        ensure!(got == right, "{id} at {position}: {got:?}, undisturbed {right:?}");

        let pool = if prefill_hangs { &cluster.prefill } else { &cluster.decode };
        let hung = pool.iter().find(|w| !w.loaded.engine.healthy()).context("it hangs still")?;
        let blocks = hung.loaded.engine.pool().counts();
        ensure!(blocks.referenced > 0, "what the hung engine computes in is its own until it moves: {blocks:?}");
        until_others_hold_nothing(&cluster, hung).await?;
        drop(release);
        until_quiet(&cluster).await?;
        ensure!(hung.loaded.engine.healthy(), "it moves again");
    }
    ensure!(retries(&cluster).await? >= 2.0, "nobody noticed");
    cluster.stop().await;
    Ok(())
}

async fn until_others_hold_nothing(cluster: &Cluster, but: &RunningWorker) -> anyhow::Result<()> {
    let deadline = Instant::now() + QUIET_MAX;
    let holds = |w: &&RunningWorker| w.party != but.party && w.loaded.engine.pool().counts().referenced > 0;
    while let Some(holder) = cluster.workers().find(holds) {
        ensure!(Instant::now() < deadline, "{} holds blocks for {}, which hangs", holder.party, but.party);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_engine_hangs() -> anyhow::Result<()> {
    an_engine_hangs(PROMPT_TOKENS, PrefillPolicy::Remote, true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_engine_hangs_in_mid_answer() -> anyhow::Result<()> {
    an_engine_hangs(PROMPT_TOKENS + 20, PrefillPolicy::Remote, false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_engine_hangs_that_prefills_itself() -> anyhow::Result<()> {
    an_engine_hangs(PROMPT_TOKENS, PrefillPolicy::Local, false).await
}

/// A model that takes seconds for an answer: time to stop somebody in the middle of it, on however busy a machine.
const SLOW_MODEL: &str = "random:hidden=512,layers=8,heads=8,kv_heads=4,vocab=500,context=2048,seed=12";
/// Tokens of an answer of it.
const LONG_ANSWER_TOKENS: u32 = 1_000;

/// A worker process of its own.
fn victim(program: &str, cluster: &Cluster) -> anyhow::Result<Service> {
    let router = format!("--routers={}", cluster.router.cluster_addr);
    let model = format!("--model={SLOW_MODEL}");
    let flags = ["--grpc-listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--instance=victim", "--log=error"];
    let flags: Vec<String> = flags.into_iter().map(str::to_owned).chain([model, router]).collect();
    Service::start(program, &flags)
}

fn long(id: &str, how: How) -> GenerateRequest {
    let mut request = request(id, how, PrefillPolicy::Remote);
    request.sampling.as_mut().expect("requests here have one").max_tokens = Some(LONG_ANSWER_TOKENS);
    request
}

/// The undisturbed answers of each kind; waits until the cluster serves.
async fn undisturbed(client: &InferenceClient<Channel>) -> anyhow::Result<Vec<Tokens>> {
    let deadline = Instant::now() + WAIT_MAX;
    let mut answers = Vec::new();
    while answers.len() < HOW.len() {
        let how = HOW[answers.len()];
        match ask(client, long(&format!("alone-{how:?}"), how)).await {
            Ok(answer) => answers.push(answer),
            Err(error) => {
                ensure!(Instant::now() < deadline, "the victim does not serve: {error:#}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    Ok(answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_process_is_killed_in_mid_answer() -> anyhow::Result<()> {
    a_decode_process_stops(true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_process_stands_still_in_mid_answer() -> anyhow::Result<()> {
    a_decode_process_stops(false).await
}

async fn a_decode_process_stops(dies: bool) -> anyhow::Result<()> {
    let mut cluster = Cluster::start(ClusterSpec::new(1, 0, &worker(SLOW_MODEL))).await?;
    let client = cluster.client().await?;
    let victim = victim("baton-decode-worker", &cluster)?;
    let right = undisturbed(&client).await?;
    let mut streams = Vec::new();
    for how in HOW {
        let mut stream = client.clone().generate(long(&format!("cut-{how:?}"), how)).await?.into_inner();
        let mut tokens = Tokens::new();
        while tokens.len() < 3 {
            take(&mut tokens, &stream.message().await?.context("more of the answer")?);
        }
        streams.push((tokens, stream));
    }
    // It stands still in mid-answer until there is another.
    victim.signal("STOP")?;
    cluster.add(false, &worker(SLOW_MODEL), "another").await?;
    if dies {
        victim.signal("KILL")?;
    }
    for ((tokens, stream), right) in streams.into_iter().zip(right) {
        let got = finish(tokens, stream).await?;
        ensure!(got == right, "{got:?}, undisturbed {right:?}");
    }
    ensure!(retries(&cluster).await? >= 2.0, "the answers were finished before it stopped");
    until_unreferenced(&cluster).await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_process_is_killed_in_its_handoff() -> anyhow::Result<()> {
    a_prefill_process_stops("KILL").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_process_stands_still_in_its_handoff() -> anyhow::Result<()> {
    a_prefill_process_stops("STOP").await
}

async fn a_prefill_process_stops(signal: &str) -> anyhow::Result<()> {
    let mut cluster = Cluster::start(ClusterSpec::new(0, 1, &worker(SLOW_MODEL))).await?;
    let client = cluster.client().await?;
    let victim = victim("baton-prefill-worker", &cluster)?;
    let right = undisturbed(&client).await?;
    let mut streams = Vec::new();
    for how in HOW {
        let id = format!("cut-{how:?}");
        cluster.gates.hold_transfer(RequestId::try_new(&id)?, HoldPoint::Verify);
        let mut stream = client.clone().generate(long(&id, how)).await?.into_inner();
        let mut tokens = Tokens::new();
        take(&mut tokens, &stream.message().await?.context("the first token, from the prefill worker")?);
        streams.push((tokens, stream));
    }
    cluster.add(true, &worker(SLOW_MODEL), "another").await?;
    victim.signal(signal)?;
    let deadline = Instant::now() + WAIT_MAX;
    while retries(&cluster).await? < 2.0 {
        ensure!(Instant::now() < deadline, "the router does not notice");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.gates.open();
    for ((tokens, stream), right) in streams.into_iter().zip(right) {
        let got = finish(tokens, stream).await?;
        ensure!(got == right, "{got:?}, undisturbed {right:?}");
    }
    until_unreferenced(&cluster).await?;
    cluster.stop().await;
    Ok(())
}
