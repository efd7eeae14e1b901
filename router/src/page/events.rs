//! The cluster as it changes, as server-sent events: `cluster` has its status, `handoffs` the handoffs of KV that ended
//! since the event before.
//!
//! Streams are bounded in number. Each holds at most one event, which counts in the budget of answers.

use super::{Page, fresh};
use crate::http::error::Shape;
use crate::status::Handoff;
use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use baton_node::intake::{Client, Hold};
use futures::stream;
use parking_lot::Mutex;
use serde_json::json;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Interval, MissedTickBehavior, interval};

/// Interval of the events.
const EVERY: Duration = Duration::from_millis(500);
/// A status that is younger than this is shared by the streams.
const SHARED_FOR: Duration = Duration::from_millis(400);
/// Longest stream: its client opens another one, with a key that is still valid.
const STREAM_MAX: Duration = Duration::from_secs(600);

/// All open streams.
#[derive(Clone, Debug)]
pub(super) struct Watchers {
    free: Arc<Semaphore>,
    max: usize,
    /// The last status as an event.
    latest: Arc<Mutex<Option<(Instant, Bytes)>>>,
}

impl Watchers {
    pub(super) fn new(max: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(max)), max, latest: Arc::default() }
    }
}

/// One stream.
struct Watch {
    page: Page,
    ticks: Interval,
    until: Instant,
    /// Number of the next handoff to tell of.
    next: u64,
    /// Memory of the event that is being read.
    hold: Hold,
    _permit: OwnedSemaphorePermit,
}

pub(super) async fn stream(State(page): State<Page>, Extension(client): Extension<Client>) -> Response {
    let Ok(permit) = page.watchers.free.clone().try_acquire_owned() else {
        let message =
            format!("{} streams are open, as many as page.watchers_max: close another page", page.watchers.max);
        return Shape::OpenAi.plain(StatusCode::SERVICE_UNAVAILABLE, &message, "too_many_watchers");
    };
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let hold = page.core.answers.hold(client);
    let watch = Watch { page, ticks, until: Instant::now() + STREAM_MAX, next: 0, hold, _permit: permit };
    let events = stream::unfold(watch, |mut watch| async move {
        let event = watch.next().await?;
        Some((Ok::<_, Infallible>(event), watch))
    });
    let mut response = fresh(Response::new(Body::from_stream(events)));
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    // Proxies that buffer would show the past.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl Watch {
    /// What happened until the next tick. `None` ends the stream: the router closes, or has no memory for its events.
    async fn next(&mut self) -> Option<Bytes> {
        let stop = self.page.stop.clone();
        tokio::select! {
            () = stop.cancelled() => return None,
            _ = self.ticks.tick() => {}
        }
        let now = Instant::now();
        if now >= self.until {
            return None;
        }
        let status = self.page.status_event(now);
        let (ended, next) = self.page.core.handoffs.since(self.next, self.page.core.runtime.now());
        self.next = next;
        let event = if ended.is_empty() { status } else { [&status[..], &handoffs_event(&ended, now)].concat().into() };
        self.hold.set(event.len() as u64).ok()?;
        Some(event)
    }
}

impl Page {
    /// The status of the cluster as an event.
    fn status_event(&self, now: Instant) -> Bytes {
        let mut latest = self.watchers.latest.lock();
        if let Some((at, event)) = &*latest
            && now.saturating_duration_since(*at) < SHARED_FOR
        {
            return event.clone();
        }
        let told = json!({"status": self.admin.cluster(), "open_handoffs": self.core.handoffs.pairs()});
        let event = Bytes::from(format!("event: cluster\ndata: {told}\n\n"));
        *latest = Some((now, event.clone()));
        event
    }
}

fn handoffs_event(ended: &[Handoff], now: Instant) -> Vec<u8> {
    let told: Vec<_> = ended.iter().map(|handoff| told(handoff, now)).collect();
    format!("event: handoffs\ndata: {}\n\n", serde_json::Value::from(told)).into_bytes()
}

fn told(handoff: &Handoff, now: Instant) -> serde_json::Value {
    let Handoff { at, request, prefill, decode, report, .. } = handoff;
    json!({
        "request": request, "prefill": prefill, "decode": decode, "transport": report.transport,
        "bytes": report.transfer_bytes, "transfer_us": report.transfer_us, "exposed_us": report.exposed_us,
        "ago_ms": u64::try_from(now.saturating_duration_since(*at).as_millis()).unwrap_or(u64::MAX),
    })
}
