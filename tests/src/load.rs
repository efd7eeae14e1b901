//! Steady load with known answers: clients that ask one router after the other, as behind a load balancer, and compare every token.

use anyhow::{Context, ensure};
use baton_proto::convert::status::to_error;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{
    FinishReason, GenerateRequest, GenerateResponse, PrefillPolicy, Sampling, Segment, TokenIds, Usage, segment::Kind,
};
use baton_types::ErrorKind;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Clients that ask at the same time.
const CLIENTS: usize = 4;
/// Longest wait for an answer: far beyond every fault.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// One request that is sent again and again: length of its prompt and its answer, and whether it is drawn instead of greedy.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of the answer.
    pub answer: u32,
    /// With a seed and penalties.
    pub drawn: bool,
}

/// Token ids and the bits of their log-probabilities.
pub(crate) type Tokens = Vec<(u32, u32)>;

/// What happened so far.
#[derive(Debug, Default)]
struct Counts {
    answered: AtomicU64,
    moved: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// Clients at work.
pub struct Load {
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Asks for the undisturbed answers at the first of `routers` (`http://host:port`), then starts the clients.
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

    /// How often a client went to another router so far.
    pub fn moved(&self) -> u64 {
        self.counts.moved.load(Ordering::Relaxed)
    }

    /// Lets the clients ask for so long; how many answers they got meanwhile.
    pub async fn goes_on(&self, what: &str, time: Duration) -> anyhow::Result<u64> {
        let before = self.answered()?;
        tokio::time::sleep(time).await;
        let answers = self.answered().with_context(|| what.to_owned())? - before;
        println!("{what}: {answers} right answers in {:.1} s", time.as_secs_f64());
        ensure!(answers > 0, "{what}: nobody was answered in {time:?}");
        Ok(answers)
    }

    /// Lets running requests end: right answers, and how often a client went to another router.
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

/// One request: at one router, and at the others where that refuses it before it has answered anything.
async fn one(routers: &[Channel], number: usize, (case, right): &(Case, Tokens), counts: &Counts) {
    let mut failure = String::new();
    for attempt in 0..routers.len() {
        match ask(&routers[(number + attempt) % routers.len()], *case).await {
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
                // Connections that close count as unavailable.
                if tokens > 0 || to_error(&status).kind != ErrorKind::Unavailable {
                    break;
                }
                counts.moved.fetch_add(u64::from(attempt + 1 < routers.len()), Ordering::Relaxed);
            }
        }
    }
    counts.failures.lock().push(failure);
}

/// The answers as they are while nothing fails.
pub(crate) async fn undisturbed(router: &Channel, cases: &[Case]) -> anyhow::Result<Vec<(Case, Tokens)>> {
    let mut right = Vec::new();
    for case in cases {
        let answer = ask(router, *case).await.map_err(|(status, _)| status);
        right.push((*case, answer.context("the undisturbed answer")?));
    }
    Ok(right)
}

/// The whole answer, or how it failed and after how many tokens.
async fn ask(router: &Channel, case: Case) -> Result<Tokens, (Status, usize)> {
    let mut request = Request::new(request(case));
    request.set_timeout(ANSWER_MAX);
    let opened = InferenceClient::new(router.clone()).generate(request).await;
    let mut stream = opened.map_err(|status| (status, 0))?.into_inner();
    let mut answer = Answer::default();
    loop {
        match stream.message().await {
            Ok(Some(message)) => answer.take(&message),
            Ok(None) => {
                let count = answer.tokens.len();
                return answer.whole(case).map_err(|why| (Status::data_loss(why), count));
            }
            Err(status) => return Err((status, answer.tokens.len())),
        }
    }
}

/// What came of an answer so far.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) tokens: Tokens,
    finish: FinishReason,
    usage: Option<Usage>,
}

impl Answer {
    /// Adds what a message brings.
    pub(crate) fn take(&mut self, message: &GenerateResponse) {
        let bits = message.logprobs.iter().map(|l| l.chosen.to_bits());
        self.tokens.extend(message.token_ids.iter().copied().zip(bits));
        (self.finish, self.usage) = (message.finish_reason(), message.usage);
    }

    /// All tokens, once its stream ended well: as many as were asked for, and a last message that says so. What it lacks otherwise.
    pub(crate) fn whole(self, case: Case) -> Result<Tokens, String> {
        let Self { tokens, finish, usage } = self;
        let counted = usage.map(|u| (u.prompt_tokens, u.completion_tokens));
        let whole = tokens.len() == case.answer as usize
            && finish == FinishReason::Length
            && counted == Some((case.prompt, case.answer));
        let what = || {
            format!("the stream ended well after {} tokens of {case:?}, with {finish:?} and {usage:?}", tokens.len())
        };
        if whole { Ok(tokens) } else { Err(what()) }
    }
}

/// The prompt of a case.
pub(crate) fn prompt(case: Case) -> Vec<u32> {
    (0..case.prompt).map(|i| i * 31 % 251).collect()
}

/// The request of a case.
pub(crate) fn request(case: Case) -> GenerateRequest {
    let Case { answer, drawn, .. } = case;
    let sampling = Sampling { max_tokens: Some(answer), ignore_eos: true, logprobs: Some(0), ..Sampling::default() };
    let sampling = if drawn {
        Sampling { temperature: Some(1.1), presence_penalty: Some(0.4), seed: Some(77), ..sampling }
    } else {
        Sampling { temperature: Some(0.0), ..sampling }
    };
    GenerateRequest {
        prompt: vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: prompt(case) })) }],
        sampling: Some(sampling),
        prefill_policy: PrefillPolicy::Auto.into(),
        ..GenerateRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::v1::Logprobs;

    #[test]
    fn an_answer_is_whole_where_its_last_message_says_so() {
        let case = Case { prompt: 5, answer: 2, drawn: false };
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
}
