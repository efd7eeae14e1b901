//! A server with everything on it, a client, and what they say when something is in the way.

use super::*;
use crate::identity::{Identity, Role};
use baton_proto::v1;
use baton_proto::v1::membership_client::MembershipClient;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::prefill_server::{Prefill, PrefillServer};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

#[tokio::test]
async fn a_server_answers_health_and_stops_when_told() {
    let listener = bind(&GrpcConfig::default()).await.unwrap();
    let address = listener.address();
    let config = GrpcConfig::default();
    let (reporter, health) = health();
    let stop = CancellationToken::new();
    let router = with_reflection(server(&config).add_service(health), &["baton.v1.Inference"]);
    let served = tokio::spawn(serve(router, listener, Identity::default(), stop.clone()));

    let channel = channel(&address.to_string(), &ChannelConfig::default(), &Identity::default(), Role::Worker).unwrap();
    let mut client = HealthClient::new(channel.clone());
    let status = client.check(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner().status;
    assert_eq!(status, 1, "serving");
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    let status = client.check(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner().status;
    assert_eq!(status, 2, "not serving");
    let missing = MembershipClient::new(channel).join(tokio_stream::pending()).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::Unimplemented);

    let taken = bind(&GrpcConfig::default().on(address)).await.unwrap_err();
    assert!(
        taken.to_string().contains(&address.to_string()) && taken.to_string().contains("another process"),
        "{taken}"
    );
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(20), served).await.expect("stops").unwrap().unwrap();
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_unavailable_and_reached_once_it_is() {
    let listener = bind(&GrpcConfig::default()).await.unwrap();
    let address = listener.address();
    drop(listener);
    let mut client = HealthClient::new(
        channel(&format!("http://{address}"), &ChannelConfig::default(), &Identity::default(), Role::Worker).unwrap(),
    );
    let error = client.check(HealthCheckRequest { service: String::new() }).await.unwrap_err();
    let error = baton_proto::convert::status::to_error(&error);
    assert_eq!(error.kind, baton_types::ErrorKind::Unavailable);

    let listener = bind(&GrpcConfig::default().on(address)).await.unwrap();
    let stop = CancellationToken::new();
    let served = tokio::spawn(serve(
        server(&GrpcConfig::default()).add_service(health().1),
        listener,
        Identity::default(),
        stop.clone(),
    ));
    client.check(HealthCheckRequest { service: String::new() }).await.expect("the same channel connects again");
    drop(client);
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(20), served).await.expect("stops").unwrap().unwrap();

    assert!(
        channel("not an address", &ChannelConfig::default(), &Identity::default(), Role::Worker)
            .unwrap_err()
            .to_string()
            .contains("host:port")
    );
}

/// Sends events for as long as somebody listens.
struct Endless;

#[tonic::async_trait]
impl Prefill for Endless {
    type RunStream = BoxStream<'static, Result<v1::PrefillEvent, Status>>;

    async fn run(&self, _: Request<v1::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        let token = v1::Token { id: 1 << 16, prefill_us: Some(1 << 20), ..v1::Token::default() };
        let event = v1::PrefillEvent { event: Some(v1::prefill_event::Event::Token(token)) };
        let events = futures::stream::repeat(event).map(Ok);
        let paced = events.then(|event| async {
            tokio::task::yield_now().await;
            event
        });
        Ok(Response::new(paced.boxed()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_cancelled_calls_end_no_other_call() {
    let listener = bind(&GrpcConfig::default()).await.unwrap();
    let address = listener.address();
    let stop = CancellationToken::new();
    let router = server(&GrpcConfig::default()).add_service(PrefillServer::new(Endless));
    let served = tokio::spawn(serve(router, listener, Identity::default(), stop.clone()));
    // As routers reach workers.
    let config = ChannelConfig { stream_window_bytes: 16 << 10, ..ChannelConfig::default() };
    let client =
        PrefillClient::new(channel(&address.to_string(), &config, &Identity::default(), Role::Worker).unwrap());
    let open = async || client.clone().run(v1::PrefillRequest::default()).await.unwrap().into_inner();

    let mut kept = open().await;
    for n in 0..5_000 {
        let mut cancelled = open().await;
        assert!(cancelled.message().await.unwrap().is_some());
        drop(cancelled);
        let event = kept.message().await.unwrap_or_else(|e| panic!("after {n} cancelled calls: {e}"));
        assert!(event.is_some());
    }
    drop((kept, client));
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(20), served).await.expect("stops").unwrap().unwrap();
}
