//! The end of a request while its handoff is being acknowledged.

use super::{FIRST, Granting, first_token_of, pair_to, request, until};
use baton_kv_transfer::{HoldPoint, TransferHooks};
use baton_proto::v1::prefill_server::Prefill;
use baton_types::RequestId;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, Span, SpanData, SpanProcessor};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tonic::Request;

/// Holds a handoff between its last write and its commit.
#[derive(Default)]
struct AtCommit {
    reached: AtomicBool,
    released: AtomicBool,
}

impl TransferHooks for AtCommit {
    fn hold(&self, point: HoldPoint, _: &RequestId) -> bool {
        if point != HoldPoint::Commit {
            return false;
        }
        self.reached.store(true, Ordering::Relaxed);
        !self.released.load(Ordering::Relaxed)
    }
}

/// The names of the spans that ended.
#[derive(Clone, Debug, Default)]
struct SpanNames(Arc<Mutex<Vec<String>>>);

impl SpanProcessor for SpanNames {
    fn on_start(&self, _: &mut Span, _: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        self.0.lock().push(span.name.into_owned());
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// An answer of few tokens may be over before the acknowledgement of its KV has arrived. Its trace has the spans of the transfer all the same.
#[tokio::test]
async fn a_committed_handoff_is_followed_after_its_stream_is_closed() {
    let hooks = Arc::new(AtCommit::default());
    let (mut service, sink) = pair_to(FIRST, hooks.clone(), |engine| Arc::new(Granting(engine.pool())));
    let names = SpanNames::default();
    let provider = SdkTracerProvider::builder().with_span_processor(names.clone()).build();
    service.parts.tracer = provider.tracer("baton");
    let mut stream = service.run(Request::new(request(&service, &sink))).await.unwrap().into_inner();
    first_token_of(&mut stream).await;
    until("the commit", || hooks.reached.load(Ordering::Relaxed)).await;
    until("prefill.compute", || names.0.lock().iter().any(|name| name == "prefill.compute")).await;
    drop(stream);
    // The call notices that meanwhile: this thread is the only one that runs it.
    tokio::time::sleep(Duration::from_millis(20)).await;
    hooks.released.store(true, Ordering::Relaxed);
    until("kv.exposed", || names.0.lock().iter().any(|name| name == "kv.exposed")).await;
    let names = names.0.lock().clone();
    assert!(
        ["decode.reserve", "kv.transfer", "kv.commit"].iter().all(|name| names.iter().any(|n| n == name)),
        "{names:?}"
    );
}

/// Where the decode worker says nothing, nobody follows the handoff for long: its blocks become free.
#[tokio::test]
async fn a_handoff_that_nobody_acknowledges_is_left_after_a_while() {
    let hooks = Arc::new(AtCommit::default());
    let (service, sink) = pair_to(FIRST, hooks.clone(), |engine| Arc::new(Granting(engine.pool())));
    let stream = service.run(Request::new(request(&service, &sink))).await.unwrap().into_inner();
    until("the commit", || hooks.reached.load(Ordering::Relaxed)).await;
    drop(stream);
    until("free blocks", || service.parts.engine.pool().counts().referenced == 0).await;
}
