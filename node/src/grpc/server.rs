//! Servers: settings, reflection, health.

use super::{GrpcConfig, Messages, STREAM_WINDOW_BYTES};
use crate::calls::Meter;
use crate::identity::GuardLayer;
use crate::listen::{BindError, Callers, Incoming, LOCAL_RESETS_MAX, Listener, RESET_STREAMS_MAX};
use futures::stream::unfold;
use std::convert::Infallible;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::health_server;
use tonic_reflection::pb::v1::server_reflection_server as v1_server;
use tonic_reflection::pb::v1alpha::server_reflection_server as v1alpha_server;
use tower_layer::{Identity as NoLayer, Stack};

/// As [`STREAM_WINDOW_BYTES`], for all streams of one connection.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Request headers are names, deadline and trace context, which need far less.
const HEADER_BYTES_MAX: u32 = 8 << 10;

/// Largest message to health and reflection, which any client may call: names of services.
const NAME_BYTES_MAX: usize = 1 << 10;

/// Calls are checked by the caller's roles, and their messages must be complete in time.
type Layers = Stack<Messages, Stack<GuardLayer, NoLayer>>;
/// A server with these layers.
pub type Server = tonic::transport::Server<Layers>;
/// The same, with services.
pub type Router = tonic::transport::server::Router<Layers>;

/// A server with the limits of `config`; add services to it, each with `max_decoding_message_size(config.message_max())`.
pub fn server(config: &GrpcConfig) -> Server {
    with(config, None)
}

/// The same for unauthenticated clients: the bytes that they send are charged to a budget before they are stored.
pub fn server_counting(config: &GrpcConfig, meter: Meter) -> Server {
    with(config, Some(meter))
}

fn with(config: &GrpcConfig, meter: Option<Meter>) -> Server {
    let messages = Messages { message_max: Duration::from_millis(config.message_ms_max), meter };
    tonic::transport::Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(config.streams_max)
        .http2_keepalive_interval(Some(Duration::from_millis(config.keepalive_ms)))
        .http2_keepalive_timeout(Some(Duration::from_millis(config.keepalive_wait_ms_max)))
        .http2_max_header_list_size(HEADER_BYTES_MAX)
        .http2_max_pending_accept_reset_streams(Some(RESET_STREAMS_MAX))
        .http2_max_local_error_reset_streams(Some(LOCAL_RESETS_MAX))
        .layer(GuardLayer)
        .layer(messages)
}

/// Listens on the address of `config`.
pub async fn bind(config: &GrpcConfig) -> Result<Listener, BindError> {
    Listener::bind(config.listen, config.connections_max).await
}

/// Serves `callers` until `stop` is cancelled; calls in flight may end first, so bound the wait with
/// [`crate::Shutdown::drain`].
pub async fn serve(
    router: Router,
    listener: Listener,
    callers: Callers,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let incoming = unfold(Incoming::new(listener, callers), |mut incoming| async {
        Some((Ok::<_, Infallible>(incoming.next().await), incoming))
    });
    router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await
}

/// Adds reflection that lists health and `services`, the names of the other services of `router`. It offers both
/// protocols: many clients, Python's among them, support only the older one.
pub fn with_reflection(router: Router, services: &[&str]) -> Router {
    let names = || [&[health_server::SERVICE_NAME], services].concat();
    let builder = |own| {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(baton_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        names().into_iter().chain([own]).fold(builder, |builder, name| builder.with_service_name(name))
    };
    let (v1, v1alpha) =
        (builder(v1_server::SERVICE_NAME).build_v1(), builder(v1alpha_server::SERVICE_NAME).build_v1alpha());
    let v1 = built(v1).max_decoding_message_size(NAME_BYTES_MAX);
    router.add_service(v1).add_service(built(v1alpha).max_decoding_message_size(NAME_BYTES_MAX))
}

/// Never panics: the descriptors are compiled in, and a test loads them.
fn built<S>(service: Result<S, tonic_reflection::server::Error>) -> S {
    service.unwrap_or_else(|error| panic!("the built-in descriptors are broken: {error}"))
}

/// The standard health service, and the reporter that sets what it answers.
pub fn health() -> (
    tonic_health::server::HealthReporter,
    tonic_health::pb::health_server::HealthServer<impl tonic_health::pb::health_server::Health>,
) {
    let (reporter, health) = tonic_health::server::health_reporter();
    (reporter, health.max_decoding_message_size(NAME_BYTES_MAX))
}
