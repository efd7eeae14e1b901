//! More load than the cluster can serve: how many answers still come within their deadline.
//!
//! Requests come by chance at a mean rate, whatever becomes of those before. The sweep raises the rate until that brings no more answers in
//! time; then three times the rate from which on it did not is offered for two minutes.

use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, bail, ensure};
use baton_proto::convert::status::to_error;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{FinishReason, GenerateRequest, Sampling, Segment, TokenIds, segment::Kind};
use baton_tests::processes::Up;
use baton_types::ErrorKind;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};
use tonic::Request;
use tonic::transport::Channel;

/// From sending the request to its last token.
const DEADLINE: Duration = Duration::from_secs(8);
/// Nothing answers later than this behind its deadline.
const HANGS: Duration = Duration::from_secs(5);
/// Clients that ask one after the other, to find the capacity from which the sweep starts.
const CLOSED_CLIENTS: usize = 8;
const CLOSED_FOR: Duration = Duration::from_secs(25);
/// First rate of the sweep, as a share of what the closed clients reached, and how the next one follows from each.
const SWEEP_FROM: f64 = 0.6;
const SWEEP_STEP: f64 = 1.35;
/// Most rates of the sweep: the last is about seven times what the closed clients reached.
const SWEEP_MAX: usize = 9;
/// A rate brings more if it does by this factor. Goodput creeps up for long where a full cluster refuses, since among more requests
/// there are more short ones that still fit.
const RISE_MIN: f64 = 1.05;
/// So many rates in a row that bring no more end the sweep: the answers of half a minute are so few that one alone may be chance.
const SWEEP_FLAT: usize = 2;
const SWEEP_FOR: Duration = Duration::from_secs(30);
const OVER: f64 = 3.0;
const OVER_FOR: Duration = Duration::from_secs(120);
const SEED: u64 = 20;
/// The longest quarter of prompts.
const LONG_PROMPT: usize = 400;

/// How one request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    InTime,
    Rejected,
    Late,
}

/// How many requests of one rate ended how, and how long they were offered.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    in_time: usize,
    rejected: usize,
    late: usize,
    /// Requests with long prompts, and those of them that were answered in time.
    long: usize,
    long_in_time: usize,
    seconds: f64,
}

impl Counts {
    fn add(&mut self, is_long: bool, end: End) {
        self.long += usize::from(is_long);
        self.long_in_time += usize::from(is_long && end == End::InTime);
        match end {
            End::InTime => self.in_time += 1,
            End::Rejected => self.rejected += 1,
            End::Late => self.late += 1,
        }
    }

    /// The share of long prompts among answers in time, as a part of their share among requests. Each of them could be in time alone.
    fn long_share(&self) -> f64 {
        let requests = self.in_time + self.rejected + self.late;
        (self.long_in_time as f64 / self.in_time.max(1) as f64) / (self.long as f64 / requests.max(1) as f64)
    }

    fn goodput(&self) -> f64 {
        self.in_time as f64 / self.seconds
    }
}

/// A prompt of 64 to 512 tokens, an answer of 16 to 48.
fn request(rng: &mut StdRng) -> GenerateRequest {
    let prompt = rng.random_range(64..=512);
    let ids = (0..prompt).map(|_| rng.random_range(100..40_000)).collect();
    let max_tokens = Some(rng.random_range(16..=48));
    let sampling = Sampling { max_tokens, ignore_eos: true, temperature: Some(0.0), ..Sampling::default() };
    GenerateRequest {
        prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids })) }],
        sampling: Some(sampling),
        ..GenerateRequest::default()
    }
}

fn prompt_tokens(request: &GenerateRequest) -> usize {
    let tokens = |segment: &Segment| if let Some(Kind::Tokens(tokens)) = &segment.kind { tokens.ids.len() } else { 0 };
    request.prompt.iter().map(tokens).sum()
}

/// Sends one request and reads its answer. Anything but a whole answer in time, a refusal that says when to come again, or a missed deadline
/// is an error.
async fn ask(router: Channel, request: GenerateRequest) -> anyhow::Result<End> {
    let since = Instant::now();
    let wanted = request.sampling.as_ref().and_then(|s| s.max_tokens).unwrap_or_default();
    let mut call = Request::new(request);
    call.set_timeout(DEADLINE);
    let answer = async {
        let mut stream = InferenceClient::new(router).generate(call).await?.into_inner();
        let (mut tokens, mut reason) = (0, FinishReason::Unspecified);
        while let Some(message) = stream.message().await? {
            tokens += message.token_ids.len();
            reason = message.finish_reason();
        }
        Ok((tokens as u32, reason))
    };
    let ended = timeout(DEADLINE + HANGS, answer).await.context("a request hangs")?;
    let error = match ended {
        Ok(whole) if whole != (wanted, FinishReason::Length) => bail!("{whole:?} is no answer of {wanted} tokens"),
        Ok(_) if since.elapsed() <= DEADLINE => return Ok(End::InTime),
        Ok(_) => return Ok(End::Late),
        Err(status) => to_error(&status),
    };
    match error.kind {
        ErrorKind::DeadlineExceeded => Ok(End::Late),
        ErrorKind::Overloaded if error.retry_after.is_some() => Ok(End::Rejected),
        _ => bail!("a request failed: {error:?}"),
    }
}

/// Requests a second of clients that ask one after the other.
async fn closed(router: &Channel) -> anyhow::Result<f64> {
    let mut clients = JoinSet::new();
    let until = Instant::now() + CLOSED_FOR;
    for client in 0..CLOSED_CLIENTS {
        let (router, mut rng) = (router.clone(), StdRng::seed_from_u64(SEED + 1 + client as u64));
        clients.spawn(async move {
            let mut answered = 0;
            while Instant::now() < until {
                answered += usize::from(ask(router.clone(), request(&mut rng)).await? == End::InTime);
            }
            anyhow::Ok(answered)
        });
    }
    let mut answered = 0;
    while let Some(client) = clients.join_next().await {
        answered += client??;
    }
    Ok(answered as f64 / CLOSED_FOR.as_secs_f64())
}

/// Offers `rate` requests a second for so long, with gaps as of a Poisson process, and waits for the end of all.
async fn offer(router: &Channel, rate: f64, time: Duration) -> anyhow::Result<Counts> {
    let mut rng = StdRng::seed_from_u64(SEED);
    let (start, mut at) = (tokio::time::Instant::now(), 0.0);
    let mut requests = JoinSet::new();
    loop {
        at -= (1.0 - rng.random::<f64>()).ln() / rate;
        if at >= time.as_secs_f64() {
            break;
        }
        sleep_until(start + Duration::from_secs_f64(at)).await;
        let (router, request) = (router.clone(), request(&mut rng));
        let is_long = prompt_tokens(&request) >= LONG_PROMPT;
        requests.spawn(async move { anyhow::Ok((is_long, ask(router, request).await?)) });
    }
    let mut counts = Counts { seconds: time.as_secs_f64(), ..Counts::default() };
    while let Some(end) = requests.join_next().await {
        let (is_long, end) = end??;
        counts.add(is_long, end);
    }
    eprintln!(
        "  {rate:.2} requests/s: {} in time, {} rejected, {} late; long prompts have {:.2} of their share",
        counts.in_time,
        counts.rejected,
        counts.late,
        counts.long_share()
    );
    Ok(counts)
}

/// Where the cluster is full.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    /// Requests offered a second, beyond which more brought no more.
    rate: f64,
    /// Most requests a second that were answered in time, at any rate.
    goodput: f64,
}

/// Offers more and more, until that brings no more.
async fn sweep(router: &Channel, capacity: f64) -> anyhow::Result<Peak> {
    let (mut peak, mut rate) = (Peak::default(), capacity * SWEEP_FROM);
    let (mut risen, mut flat) = (0.0, 0);
    for _ in 0..SWEEP_MAX {
        let goodput = offer(router, rate, SWEEP_FOR).await?.goodput();
        peak.goodput = goodput.max(peak.goodput);
        if goodput > risen * RISE_MIN {
            (peak.rate, risen, flat) = (rate, goodput, 0);
        } else {
            flat += 1;
        }
        if flat == SWEEP_FLAT {
            return Ok(peak);
        }
        rate *= SWEEP_STEP;
    }
    eprintln!("  after {SWEEP_MAX} rates, more still brings more: the peak is not among them");
    Ok(peak)
}

async fn run(summary: &mut Summary) -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=512MiB"])?;
    let router =
        Channel::from_shared(format!("http://{}", up.grpc()?.trim_start_matches("http://")))?.connect().await?;
    let capacity = closed(&router).await?;
    ensure!(capacity > 0.0, "nobody was answered");
    let peak = sweep(&router, capacity).await?;
    ensure!(peak.goodput > 0.0, "nobody was answered in time");
    let over = offer(&router, OVER * peak.rate, OVER_FOR).await?;
    summary.add("goodput_peak", Figure::plain(peak.goodput, "requests/s in time"), None);
    let of = format!(
        "goodput_peak, at three times the {:.2} requests/s that fill it: {} rejected, {} late",
        peak.rate, over.rejected, over.late
    );
    let figure = Figure::ratio(over.goodput(), "requests/s in time", over.goodput() / peak.goodput, of);
    summary.add("goodput_overload", figure, Target::AtLeast(0.9));
    let share = Figure::plain(
        over.long_share(),
        "share of prompts of 400 tokens and more among answers, over that among requests",
    );
    summary.add("overload_long_share", share, Target::AtLeast(0.8));
    up.stop()
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("overload: answers of 16 to 48 tokens within {DEADLINE:?}");
    tokio::runtime::Runtime::new()?.block_on(run(summary))
}
