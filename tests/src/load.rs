//! Steady load with known answers: clients that send requests to the routers in turn, as behind a load balancer, and compare every token.

use anyhow::{Context, ensure};
use baton_proto::convert::status::to_error;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{
    FinishReason, GenerateRequest, GenerateResponse, PrefillPolicy, Sampling, Segment, TokenIds, Usage, segment::Kind,
};
use baton_types::ErrorKind;
use futures::stream::{StreamExt as _, TryStreamExt as _, iter};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Concurrent clients.
const CLIENTS: usize = 4;
/// Longest wait for an answer: far longer than any fault.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Interval of the checks of a wait.
const LOOK: Duration = Duration::from_millis(20);

/// Minimum number of prompts, all different: KV of another prompt would give another answer.
const PROMPTS_MIN: usize = 24;
/// Undisturbed answers requested at the same time.
const FIRST_AT_ONCE: usize = 4;

/// A kind of request: length of its prompt and its answer, and whether it is sampled instead of greedy.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of the answer.
    pub answer: u32,
    /// Sampled, with a seed and penalties.
    pub drawn: bool,
    /// Number of samples; those of a greedy request are all equal.
    pub samples: u32,
    /// Leading tokens that prompts of this kind share with others, and find in their caches.
    pub shared: u32,
}

impl Case {
    /// One sample of a prompt that shares hardly any token with any other.
    pub const fn new(prompt: u32, answer: u32, drawn: bool) -> Self {
        Self { prompt, answer, drawn, samples: 1, shared: 0 }
    }
}

/// Token ids and the bits of their log-probabilities.
pub(crate) type Tokens = Vec<(u32, u32)>;

/// One request that is sent repeatedly, and its answer while nothing fails.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) case: Case,
    /// Makes the prompt, of any length, different from others.
    salt: u32,
    /// By sample.
    pub(crate) answer: Vec<Tokens>,
}

impl Known {
    pub(crate) fn request(&self) -> GenerateRequest {
        request(self.case, self.salt)
    }

    pub(crate) fn prompt(&self) -> Vec<u32> {
        prompt(self.case, self.salt)
    }
}

/// Counts so far.
#[derive(Debug, Default)]
struct Counts {
    answered: AtomicU64,
    moved: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// Running clients.
pub struct Load {
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Requests the undisturbed answers from the first of `routers` (`http://host:port`), then starts the clients.
    pub async fn start(routers: &[String], cases: &[Case]) -> anyhow::Result<Self> {
        let channel = |url: &String| anyhow::Ok(Endpoint::from_shared(url.clone())?.connect_lazy());
        let channels = || routers.iter().map(channel).collect::<anyhow::Result<Vec<Channel>>>();
        let first = channels()?;
        let right = undisturbed(&first[0], cases).await?;
        let (counts, stop) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
        let mut clients = Vec::new();
        for client in 0..CLIENTS {
            let (channels, right, counts, stop) = (channels()?, right.clone(), counts.clone(), stop.clone());
            clients.push(tokio::spawn(async move {
                let mut number = client;
                while !stop.load(Ordering::Relaxed) {
                    one(&channels, number, &right[number % right.len()], &counts).await;
                    number += 1;
                }
            }));
        }
        Ok(Self { counts, stop, clients })
    }

    /// Right answers so far; an error once one was wrong or failed.
    pub fn answered(&self) -> anyhow::Result<u64> {
        let failures = self.counts.failures.lock();
        ensure!(failures.is_empty(), "{} requests failed: {:#?}", failures.len(), &failures[..failures.len().min(5)]);
        Ok(self.counts.answered.load(Ordering::Relaxed))
    }

    /// How often a client moved to another router so far.
    pub fn moved(&self) -> u64 {
        self.counts.moved.load(Ordering::Relaxed)
    }

    /// Lets the clients run for this time, and until one of them got an answer. Returns how many answers they got.
    pub async fn goes_on(&self, what: &str, time: Duration) -> anyhow::Result<u64> {
        let (before, begin) = (self.answered()?, Instant::now());
        tokio::time::sleep(time).await;
        let answers = loop {
            let answers = self.answered().with_context(|| what.to_owned())? - before;
            if answers > 0 {
                break answers;
            }
            ensure!(begin.elapsed() < time + ANSWER_MAX, "{what}: nobody was answered in {:?}", begin.elapsed());
            tokio::time::sleep(LOOK).await;
        };
        println!("{what}: {answers} right answers in {:.1} s", begin.elapsed().as_secs_f64());
        Ok(answers)
    }

    /// Waits for running requests to end. Returns the right answers, and how often a client moved to another router.
    pub async fn stop(self) -> anyhow::Result<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await?;
        }
        let failures = self.counts.failures.lock();
        ensure!(failures.is_empty(), "{} requests failed: {failures:#?}", failures.len());
        Ok((self.counts.answered.load(Ordering::Relaxed), self.counts.moved.load(Ordering::Relaxed)))
    }
}

/// One request: to one router, and to the others if that router refuses it before it has sent anything.
async fn one(routers: &[Channel], number: usize, known: &Known, counts: &Counts) {
    let Known { case, salt, answer: right } = known;
    let mut failure = String::new();
    for attempt in 0..routers.len() {
        match ask(&routers[(number + attempt) % routers.len()], *case, *salt).await {
            Ok(tokens) if tokens == *right => {
                counts.answered.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Ok(tokens) => {
                failure = format!("{case:?}: wrong: {tokens:?}, undisturbed {right:?}");
                break;
            }
            Err((status, tokens)) => {
                failure = format!("{case:?} after {tokens} tokens: {status}");
                // Closed connections count as unavailable.
                if tokens > 0 || to_error(&status).kind != ErrorKind::Unavailable {
                    break;
                }
                counts.moved.fetch_add(u64::from(attempt + 1 < routers.len()), Ordering::Relaxed);
            }
        }
    }
    counts.failures.lock().push(failure);
}

/// Each kind of request with several prompts, [`PROMPTS_MIN`] in all, and the answers as they are while nothing fails.
pub(crate) async fn undisturbed(router: &Channel, cases: &[Case]) -> anyhow::Result<Vec<Known>> {
    let rounds = PROMPTS_MIN.div_ceil(cases.len());
    let asked = (0..rounds).flat_map(|_| cases).zip(0..).map(|(case, salt)| async move {
        let answer = ask(router, *case, salt).await.map_err(|(status, _)| status).context("the undisturbed answer")?;
        anyhow::Ok(Known { case: *case, salt, answer })
    });
    let known: Vec<Known> = iter(asked).buffered(FIRST_AT_ONCE).try_collect().await?;
    let different: HashSet<&Tokens> = known.iter().map(|known| &known.answer[0]).collect();
    ensure!(different.len() == known.len(), "two prompts have one answer, which does not tell them apart");
    let samples = |known: &Known| known.answer.iter().collect::<HashSet<_>>().len();
    let alike = known.iter().find(|known| known.case.drawn && samples(known) != known.case.samples as usize);
    ensure!(alike.is_none(), "two samples are one, which does not tell them apart: {alike:?}");
    Ok(known)
}

/// The complete answer by sample, or how it failed and after how many tokens.
async fn ask(router: &Channel, case: Case, salt: u32) -> Result<Vec<Tokens>, (Status, usize)> {
    let mut request = Request::new(request(case, salt));
    request.set_timeout(ANSWER_MAX);
    let opened = InferenceClient::new(router.clone()).generate(request).await;
    let mut stream = opened.map_err(|status| (status, 0))?.into_inner();
    let mut answer = Answer::default();
    loop {
        match stream.message().await {
            Ok(Some(message)) => answer.take(&message),
            Ok(None) => {
                let count = answer.count();
                return answer.whole(case).map_err(|why| (Status::data_loss(why), count));
            }
            Err(status) => return Err((status, answer.count())),
        }
    }
}

/// The received part of an answer.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    samples: Vec<Tokens>,
    finish: Vec<FinishReason>,
    usage: Option<Usage>,
}

impl Answer {
    /// Adds the contents of a message.
    pub(crate) fn take(&mut self, message: &GenerateResponse) {
        let index = message.index as usize;
        if self.samples.len() <= index {
            self.samples.resize_with(index + 1, Tokens::new);
            self.finish.resize(index + 1, FinishReason::Unspecified);
        }
        let bits = message.logprobs.iter().map(|l| l.chosen.to_bits());
        self.samples[index].extend(message.token_ids.iter().copied().zip(bits));
        (self.finish[index], self.usage) = (message.finish_reason(), message.usage);
    }

    /// Received tokens of all samples.
    pub(crate) fn count(&self) -> usize {
        self.samples.iter().map(Vec::len).sum()
    }

    /// Whether each sample is a prefix of the right one; otherwise the first difference.
    pub(crate) fn begins(&self, right: &[Tokens]) -> Result<(), String> {
        if self.samples.len() > right.len() {
            return Err(format!("{} samples, of {} asked for", self.samples.len(), right.len()));
        }
        for (sample, (tokens, right)) in self.samples.iter().zip(right).enumerate() {
            if !right.starts_with(tokens) {
                let at = tokens.iter().zip(right).take_while(|(got, right)| got == right).count();
                let (got, right, of) = (tokens.get(at), right.get(at), right.len());
                return Err(format!("token {at} of {of} of sample {sample} is {got:?}, undisturbed {right:?}"));
            }
        }
        Ok(())
    }

    /// All tokens, if the stream ended correctly: with the requested number of tokens and with last messages that state it. Otherwise
    /// what is missing.
    pub(crate) fn whole(self, case: Case) -> Result<Vec<Tokens>, String> {
        let Self { samples, finish, usage } = self;
        let counted = usage.map(|u| (u.prompt_tokens, u.completion_tokens));
        let whole = samples.len() == case.samples as usize
            && samples.iter().all(|tokens| tokens.len() == case.answer as usize)
            && finish.iter().all(|finish| *finish == FinishReason::Length)
            && counted == Some((case.prompt, case.answer * case.samples));
        let what = || {
            let counts: Vec<usize> = samples.iter().map(Vec::len).collect();
            format!("the stream ended well after {counts:?} tokens of {case:?}, with {finish:?} and {usage:?}")
        };
        if whole { Ok(samples) } else { Err(what()) }
    }
}

/// A prime; every model has at least this many token ids.
const IDS: u32 = 251;

/// The prompt of a case with this salt, which is less than 200. After the shared part, no two prompts have more than one token of [`IDS`]
/// in common at the same position.
fn prompt(case: Case, salt: u32) -> Vec<u32> {
    let token = |i: u32| if i < case.shared { (i * 7 + 3) % IDS } else { (i * (31 + salt) + salt * salt) % IDS };
    (0..case.prompt).map(token).collect()
}

fn request(case: Case, salt: u32) -> GenerateRequest {
    let Case { answer, drawn, .. } = case;
    let sampling = Sampling { max_tokens: Some(answer), ignore_eos: true, logprobs: Some(0), ..Sampling::default() };
    let sampling = if drawn {
        Sampling { temperature: Some(1.1), presence_penalty: Some(0.4), seed: Some(77), ..sampling }
    } else {
        Sampling { temperature: Some(0.0), ..sampling }
    };
    GenerateRequest {
        prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt(case, salt) })) }],
        sampling: Some(sampling),
        prefill_policy: PrefillPolicy::Auto.into(),
        // Half of the requests find earlier ones in the cache; the others are computed in full, as the first one was. A shared prefix is
        // cached.
        cache_salt: (case.shared == 0 && rand::random()).then(|| rand::random::<u64>().to_string()),
        n: (case.samples > 1).then_some(case.samples),
        ..GenerateRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::v1::Logprobs;

    #[test]
    fn prompts_share_hardly_a_token() {
        let case = Case::new(2 * IDS, 1, false);
        for (a, b) in (0..60).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let same = prompt(case, a).iter().zip(prompt(case, b)).filter(|(a, b)| **a == *b).count();
            assert_eq!(same, 2, "{a} and {b}");
        }
        let shared = Case { shared: 32, ..case };
        let same = (0..2 * IDS as usize).filter(|i| prompt(shared, 1)[*i] == prompt(shared, 2)[*i]).count();
        assert!((32..=34).contains(&same), "{same}");
    }

    #[test]
    fn an_answer_is_whole_where_its_last_message_says_so() {
        let case = Case::new(5, 2, false);
        let message = |id: u32, finish: FinishReason, usage: Option<Usage>| GenerateResponse {
            token_ids: vec![id],
            logprobs: vec![Logprobs::default()],
            finish_reason: finish.into(),
            usage,
            ..GenerateResponse::default()
        };
        let usage =
            |prompt_tokens, completion_tokens| Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() });
        let (more, length) = (FinishReason::Unspecified, FinishReason::Length);
        let whole = |messages: &[GenerateResponse]| {
            let mut answer = Answer::default();
            messages.iter().for_each(|message| answer.take(message));
            answer.whole(case).is_ok()
        };
        let first = message(1, more, None);
        assert!(whole(&[first.clone(), message(2, length, usage(5, 2))]));
        let all_but = [
            vec![],
            vec![message(1, length, usage(5, 1))],
            vec![first.clone(), message(2, more, None)],
            vec![first.clone(), message(2, length, None)],
            vec![first.clone(), message(2, FinishReason::Cancelled, usage(5, 2))],
            vec![first.clone(), message(2, length, usage(5, 1))],
            vec![first.clone(), message(2, length, usage(4, 2))],
            vec![message(1, length, usage(5, 2)), message(2, more, None)],
        ];
        for messages in all_but {
            assert!(!whole(&messages), "{messages:?}");
        }
    }

    #[test]
    fn samples_are_told_apart() {
        let case = Case { samples: 2, ..Case::new(5, 1, true) };
        let (length, right) = (FinishReason::Length, [vec![(1, 0)], vec![(2, 0)]]);
        let message = |index: u32, id: u32, usage: Option<Usage>| GenerateResponse {
            index,
            token_ids: vec![id],
            logprobs: vec![Logprobs::default()],
            finish_reason: length.into(),
            usage,
            ..GenerateResponse::default()
        };
        let usage = Some(Usage { prompt_tokens: 5, completion_tokens: 2, ..Usage::default() });
        let answer = |messages: &[GenerateResponse]| {
            let mut answer = Answer::default();
            messages.iter().for_each(|message| answer.take(message));
            (answer.begins(&right).is_ok(), answer.whole(case).is_ok())
        };
        assert_eq!(answer(&[message(1, 2, None), message(0, 1, usage)]), (true, true));
        assert_eq!(answer(&[message(0, 2, None), message(1, 1, usage)]), (false, true), "one for the other");
        assert_eq!(answer(&[message(0, 1, usage)]), (true, false), "one is missing");
        assert_eq!(answer(&[message(0, 1, None), message(1, 2, None), message(2, 3, usage)]), (false, false));
    }
}
