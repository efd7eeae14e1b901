//! All samples of a request, run at once: the request ends with the last of them, or with the first that fails.

use super::answer::Answer;
use super::core::Core;
use super::end;
use super::job::Job;
use super::prepare::Admitted;
use super::sample::Sample;
use crate::output::{Event, EventResult, Finished, Total, usage_of_all, usage_of_prompts};
use baton_types::{ErrorKind, RequestError};
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use std::sync::Arc;
use tokio::sync::mpsc::{self, OwnedPermit};
use tracing::Instrument;

/// Starts the task of a job with one sample per slot; it ends when the client stops listening.
pub(super) fn start(core: &Arc<Core>, job: Job, admitted: Admitted, out: mpsc::Sender<EventResult>) {
    let span = job.span.clone();
    // Within the log span in which it is started.
    let task = run(job, core.clone(), admitted, out).in_current_span().instrument(span);
    core.runtime.spawn(core.tasks.track_future(task).boxed());
}

/// Runs the request to its end and sends the result to the client. Ends early if the client disconnects, the deadline
/// passes or the router stops.
async fn run(job: Job, core: Arc<Core>, admitted: Admitted, out: mpsc::Sender<EventResult>) {
    let Admitted { slots, quota, .. } = admitted;
    // Reserved before anything else is sent: a client that stopped reading still receives the reason why it was cut
    // off.
    let mut ends: Vec<_> = slots.iter().filter_map(|_| out.clone().try_reserve_owned().ok()).collect();
    let samples: Vec<Sample<'_>> = (0..slots.len() as u32).map(|index| Sample::new(&job, index)).collect();
    let mut answers: Vec<_> = samples.iter().map(|sample| Answer::new(&core, sample, &out)).collect();
    let running = samples.iter().zip(&mut answers).zip(slots);
    let running: FuturesUnordered<_> =
        running.map(|((sample, answer), slot)| sample.run(&core, slot, answer)).collect();
    let result = tokio::select! {
        biased;
        () = out.closed() => Err(RequestError::new(ErrorKind::Cancelled, "the client is gone")),
        () = core.abort.cancelled() => Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; send the request again")),
        () = core.runtime.sleep_until(job.deadline) => {
            Err(RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before the answer was finished"))
        }
        result = all(running, &mut ends) => result,
    };
    // Prompts count that ran; if none did, the request is told how long the first one was.
    let ran =
        |answers: &[Answer<'_>]| usage_of_all(answers.iter().filter(|answer| answer.has_started()).map(Answer::usage));
    let mut usages: Vec<_> = answers.chunks(job.samples as usize).filter_map(ran).collect();
    if usages.is_empty() {
        usages.extend(answers.first().map(Answer::usage));
    }
    let usage = usage_of_prompts(usages.into_iter());
    let cost = core.prices.cost(&job.model.card.id, &usage);
    let summary = end::Summary {
        usage,
        cost: cost.as_ref(),
        queued: samples.iter().map(Sample::queued).min().unwrap_or_default(),
        first_token: answers.iter().filter_map(Answer::first_token_at).min(),
        moved: end::Moved::of_all(answers.iter().map(Answer::timings)),
    };
    end::record(&core, &job, &result, &summary);
    let now = core.runtime.now();
    for (sample, answer) in samples.iter().zip(&answers) {
        core.experience.learn(&job.model.card.id, &sample.ended(answer, result.is_ok(), now), now);
    }
    drop(answers);
    // A client that has read the end may send its next request.
    drop(quota);
    if let Some(end) = ends.pop() {
        end.send(result.map(|last| Event::Finished(Finished { total: Some(Total { usage, cost }), ..last })));
    }
}

/// Sends each sample's end to the client; the last one is the result.
async fn all(
    mut running: FuturesUnordered<impl Future<Output = Result<Finished, RequestError>>>,
    ends: &mut Vec<OwnedPermit<EventResult>>,
) -> Result<Finished, RequestError> {
    loop {
        let finished = match running.next().await {
            Some(result) => result?,
            None => return Err(RequestError::new(ErrorKind::Internal, "a request without samples")),
        };
        if running.is_empty() {
            return Ok(finished);
        }
        if let Some(end) = ends.pop() {
            end.send(Ok(Event::Finished(finished)));
        }
    }
}
