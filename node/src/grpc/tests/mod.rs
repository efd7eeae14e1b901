//! A server with all services, a client, and their errors when something fails.

mod probe;

use super::*;
use crate::identity::{Identity, Role};
use crate::intake::{Client, Intake};
use crate::listen::Callers;
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
    let served = tokio::spawn(serve(router, listener, Callers::default(), stop.clone()));

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
        Callers::default(),
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

/// Sends events while a client listens.
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
    let served = tokio::spawn(serve(router, listener, Callers::default(), stop.clone()));
    // As routers connect to workers.
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

/// Calls whose request is never complete, as their frames: (sent at once, sent byte by byte after it).
#[tokio::test]
async fn a_message_that_does_not_come_whole_ends_its_call() {
    const SHORT: Duration = Duration::from_millis(200);
    let config = GrpcConfig { message_ms_max: 200, ..GrpcConfig::default() };
    let listener = bind(&config).await.unwrap();
    let address = listener.address();
    let router = with_reflection(server(&config).add_service(health().1), &[]);
    let stop = CancellationToken::new();
    tokio::spawn(serve(router, listener, Callers::default(), stop.clone()));
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let call = async |path: &str| {
        let request = http::Request::post(format!("http://{address}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        client.clone().ready().await.unwrap().send_request(request.body(()).unwrap(), false).unwrap()
    };
    let ends_late = async |answer: h2::client::ResponseFuture| {
        let began = std::time::Instant::now();
        let answer = tokio::time::timeout(Duration::from_secs(20), answer).await.expect("held for ever").unwrap();
        assert_eq!(answer.headers()["grpc-status"], "4", "{answer:?}");
        assert!(began.elapsed() > SHORT / 2);
    };
    let check = "/grpc.health.v1.Health/Check";
    let half = b"\0\0\0\0\x40".to_vec();
    // Nothing, half a length, half a message, and a complete one without the end of the stream.
    for sent in [&b""[..], &half[..3], &[&half[..], &[0; 9]].concat(), b"\0\0\0\0\0"] {
        let (answer, mut body) = call(check).await;
        body.send_data(sent.to_vec().into(), false).unwrap();
        ends_late(answer).await;
    }
    let (answer, mut body) = call(check).await;
    body.send_data(half.clone().into(), false).unwrap();
    let drips = tokio::spawn(async move {
        while body.send_data(vec![0].into(), false).is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    });
    ends_late(answer).await;
    drips.abort();
    // A stream may be silent once its answer has begun, but not in the middle of a message.
    let (answer, mut body) = call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo").await;
    body.send_data(b"\0\0\0\0\x02\x3a\0".to_vec().into(), false).unwrap();
    let mut answers = answer.await.unwrap().into_body();
    assert!(answers.data().await.unwrap().is_ok());
    assert!(tokio::time::timeout(3 * SHORT, answers.data()).await.is_err(), "it was cut off between messages");
    body.send_data(half.into(), false).unwrap();
    let began = std::time::Instant::now();
    let end = tokio::time::timeout(Duration::from_secs(20), async {
        while let Some(Ok(_)) = answers.data().await {}
        answers.trailers().await
    });
    // Reflection ends its answer when the stream of questions fails; the status is its own.
    assert!(end.await.expect("held for ever").unwrap().is_some(), "no status");
    assert!(began.elapsed() > SHORT / 2);
    stop.cancel();
}

/// A server of health and reflection that charges calls to `intake`, all from one address.
async fn counting(intake: &Intake) -> (std::net::SocketAddr, CancellationToken) {
    let listener = bind(&GrpcConfig::default()).await.unwrap();
    let address = listener.address();
    let meter = {
        let intake = intake.clone();
        move |_: &http::request::Parts| intake.hold(Client::at([127, 0, 0, 1].into()))
    };
    let router = server_counting(&GrpcConfig::default(), std::sync::Arc::new(meter)).add_service(health().1);
    let stop = CancellationToken::new();
    tokio::spawn(serve(with_reflection(router, &[]), listener, Callers::default(), stop.clone()));
    (address, stop)
}

/// Waits until calls that ended have returned what they held.
async fn all_given_back(intake: &Intake) {
    let wait = async {
        while intake.used() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("calls that ended are counted");
}

/// A client that reads no answers may fill its stream window, and reflection reads no more of it then.
#[tokio::test]
async fn reflection_counts_with_what_it_may_leave_unread() {
    let intake = Intake::new(4 << 20, 4 << 20);
    let (address, stop) = counting(&intake).await;
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut open = Vec::new();
    let refused = loop {
        let request =
            http::Request::post(format!("http://{address}/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"))
                .header("content-type", "application/grpc")
                .header("te", "trailers");
        let mut ready = client.clone().ready().await.unwrap();
        let (answer, mut body) = ready.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data(b"\0\0\0\0\x02\x3a\0".to_vec().into(), false).unwrap();
        let answer = answer.await.unwrap();
        if answer.headers().contains_key("grpc-status") {
            break answer;
        }
        open.push((answer, body));
        assert!(open.len() < 100, "nothing is counted");
    };
    assert_eq!((refused.headers()["grpc-status"].as_bytes(), open.len()), (&b"8"[..], 3));
    assert!(intake.used() > 3 << 20);
    connection.abort();
    drop(open);
    all_given_back(&intake).await;
    stop.cancel();
}

/// Watches of health never end by themselves, and need no key.
#[tokio::test]
async fn open_calls_are_counted_with_their_headers_until_they_end() {
    let intake = Intake::new(1 << 20, 1 << 20);
    let (address, stop) = counting(&intake).await;
    let channel = channel(&address.to_string(), &ChannelConfig::default(), &Identity::default(), Role::Worker).unwrap();
    let open_until_refused = async |header: usize| {
        let mut open = Vec::new();
        loop {
            let mut watch = Request::new(HealthCheckRequest { service: String::new() });
            watch.metadata_mut().insert("x-long", "x".repeat(header).parse().unwrap());
            match HealthClient::new(channel.clone()).watch(watch).await {
                Ok(watch) => open.push(watch),
                Err(refused) => {
                    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
                    assert!(refused.message().contains("try again later"), "{refused}");
                    return open;
                }
            }
            assert!(open.len() < 1_000, "calls are counted nowhere");
        }
    };
    let short = open_until_refused(1).await;
    assert!(short.len() > 50 && intake.used() <= 1 << 20, "{} calls", short.len());
    let count = short.len();
    drop(short);
    all_given_back(&intake).await;
    let long = open_until_refused(6 << 10).await;
    assert!(long.len() < count * 2 / 3, "{} calls with long headers, {count} with short ones", long.len());
    drop(long);
    all_given_back(&intake).await;
    stop.cancel();
}
