//! A server with everything on it, a client, and what they say when something is in the way.

use super::*;
use baton_proto::v1::membership_client::MembershipClient;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

#[tokio::test]
async fn a_server_answers_health_and_stops_when_told() {
    let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = GrpcConfig::default();
    let (reporter, health) = health();
    let stop = CancellationToken::new();
    let router = with_reflection(server(&config).add_service(health), &["baton.v1.Inference"]);
    let served = tokio::spawn(serve(router, listener, stop.clone()));

    let channel = channel(&address.to_string(), &ChannelConfig::default()).unwrap();
    let mut client = HealthClient::new(channel.clone());
    let status = client.check(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner().status;
    assert_eq!(status, 1, "serving");
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    let status = client.check(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner().status;
    assert_eq!(status, 2, "not serving");
    let missing = MembershipClient::new(channel).join(tokio_stream::pending()).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::Unimplemented);

    let taken = bind(address).await.unwrap_err();
    assert!(
        taken.to_string().contains(&address.to_string()) && taken.to_string().contains("another process"),
        "{taken}"
    );
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(20), served).await.expect("stops").unwrap().unwrap();
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_unavailable_and_reached_once_it_is() {
    let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut client = HealthClient::new(channel(&format!("http://{address}"), &ChannelConfig::default()).unwrap());
    let error = client.check(HealthCheckRequest { service: String::new() }).await.unwrap_err();
    let error = baton_proto::convert::status::to_error(&error);
    assert_eq!(error.kind, baton_types::ErrorKind::Unavailable);

    let listener = bind(address).await.unwrap();
    let stop = CancellationToken::new();
    let served = tokio::spawn(serve(server(&GrpcConfig::default()).add_service(health().1), listener, stop.clone()));
    client.check(HealthCheckRequest { service: String::new() }).await.expect("the same channel connects again");
    drop(client);
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(20), served).await.expect("stops").unwrap().unwrap();

    assert!(channel("not an address", &ChannelConfig::default()).unwrap_err().to_string().contains("host:port"));
}
