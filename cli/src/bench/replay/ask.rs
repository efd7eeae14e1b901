//! One request, as its client sees it.

use crate::bench::report::{Ending, Outcome};
use crate::grpc::{self, Last, Options, Prompt};
use crate::router::RouterChannel;
use baton_proto::convert::status::to_error;
use baton_types::ErrorKind;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tonic::Status;

/// Time after its deadline until a request without an answer from the router counts as failed.
const GRACE: Duration = Duration::from_secs(5);
/// The error of an answer that ended too early, which the cluster should never let happen.
const INCOMPLETE: &str = "incomplete";

/// The router and model to call.
#[derive(Clone)]
pub(in crate::bench) struct Target {
    pub(in crate::bench) channel: RouterChannel,
    /// Empty if the cluster serves one model.
    pub(in crate::bench) model: String,
    /// Longest time for one answer.
    pub(in crate::bench) timeout: Duration,
}

/// The request to send.
pub(super) struct Question {
    pub(super) prompt: Vec<u32>,
    pub(super) output_tokens: u32,
    /// The hits of an infinite cache for the prompt.
    pub(super) infinite_tokens: u32,
}

/// The outcome, and the router's status if it failed.
pub(super) struct Answered {
    pub(super) outcome: Outcome,
    pub(super) status: Option<Status>,
}

/// Sends the request and waits for the answer, an error, the deadline, or `stop`. Times are relative to `start`.
pub(super) async fn ask(
    target: Target,
    question: Question,
    start: Instant,
    mut stop: watch::Receiver<bool>,
) -> Answered {
    let at = start.elapsed();
    let mut outcome = Outcome {
        result: Ending::Cancelled,
        ..Outcome::shed(at, question.prompt.len() as u32, question.infinite_tokens)
    };
    let mut clock = Clock { begin: Instant::now(), last: None };
    let deadline = target.timeout + GRACE;
    let wanted = question.output_tokens;
    let ended = tokio::select! {
        ended = tokio::time::timeout(deadline, stream(target, question, &mut outcome, &mut clock)) => Some(ended),
        // A closed channel counts as a stop.
        _ = stop.wait_for(|stop| *stop) => None,
    };
    let mut status = None;
    outcome.result = match ended {
        None => Ending::Cancelled,
        Some(Ok(Ok(true))) if outcome.output_tokens == wanted => Ending::Ok,
        Some(Ok(Ok(_))) => Ending::Failed(INCOMPLETE.into()),
        Some(Ok(Err(error))) => {
            let kind = to_error(&error).kind;
            status = Some(error);
            Ending::Failed(kind.name().into())
        }
        Some(Err(_)) => Ending::Failed(ErrorKind::DeadlineExceeded.name().into()),
    };
    outcome.end = start.elapsed();
    Answered { outcome, status }
}

/// Records when tokens arrive.
struct Clock {
    begin: Instant,
    last: Option<Instant>,
}

impl Clock {
    /// Records `count` tokens that arrived now.
    fn tokens(&mut self, count: usize, outcome: &mut Outcome) {
        let now = Instant::now();
        for _ in 0..count {
            match self.last.replace(now) {
                None => outcome.ttft = Some(now - self.begin),
                Some(last) => outcome.gaps_us.push(u32::try_from((now - last).as_micros()).unwrap_or(u32::MAX)),
            }
        }
        outcome.output_tokens += count as u32;
    }
}

/// Reads the answer. Returns whether it ended with its last message.
async fn stream(target: Target, question: Question, outcome: &mut Outcome, clock: &mut Clock) -> Result<bool, Status> {
    let options = Options { max_tokens: Some(question.output_tokens), ignore_eos: true, ..Options::default() };
    let request = grpc::Question { model: target.model, prompt: Prompt::Tokens(question.prompt), options };
    clock.begin = Instant::now();
    let mut answer = request.ask(target.channel, target.timeout).await?;
    let mut ended = false;
    while let Some(part) = answer.next().await? {
        clock.tokens(part.tokens, outcome);
        if let Some(last) = part.last {
            ended = last.is_full_length;
            outcome.cached_tokens = last.cached_tokens;
            outcome.placement = prefilled(&last, outcome.output_tokens);
        }
    }
    Ok(ended)
}

/// Where the prompt was prefilled. An answer of one token moves no KV, so its timings do not reveal it.
fn prefilled(last: &Last, output_tokens: u32) -> Option<String> {
    let moved = last.transfer_bytes.is_some() || last.transfer_us.is_some();
    match (moved, output_tokens) {
        (true, _) => Some("prefilled remotely".into()),
        (false, 0..=1) => None,
        (false, _) => Some("prefilled where they decode".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_come_together_have_nothing_between_them() {
        let mut outcome = Outcome::shed(Duration::ZERO, 5, 0);
        let mut clock = Clock { begin: Instant::now(), last: None };
        clock.tokens(0, &mut outcome);
        assert_eq!(outcome.ttft, None, "a message without tokens is no first token");
        clock.tokens(2, &mut outcome);
        std::thread::sleep(Duration::from_millis(3));
        clock.tokens(1, &mut outcome);
        assert!(outcome.ttft.is_some());
        assert_eq!((outcome.output_tokens, outcome.gaps_us.len(), outcome.gaps_us[0]), (3, 2, 0));
        assert!(outcome.gaps_us[1] >= 3_000, "{:?}", outcome.gaps_us);
    }

    #[test]
    fn kv_that_moved_tells_where_a_prompt_was_prefilled() {
        let moved = Last { transfer_bytes: Some(5), ..Last::default() };
        assert_eq!(prefilled(&moved, 2).as_deref(), Some("prefilled remotely"));
        assert_eq!(prefilled(&Last::default(), 2).as_deref(), Some("prefilled where they decode"));
        assert_eq!(prefilled(&Last::default(), 1), None);
    }
}
