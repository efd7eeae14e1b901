//! An HTTP server over a listener, with limits that `axum::serve` cannot set.

use super::{Callers, Incoming, LOCAL_RESETS_MAX, Listener, RESET_STREAMS_MAX};
use crate::grpc::{KEEPALIVE_MS, KEEPALIVE_WAIT_MS};
use crate::intake::Client;
use axum::Router;
use baton_types::places::place_to_free;
use hyper::Request;
use hyper::body;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected as _;
use tower_service::Service as _;

/// Read buffer of an HTTP/1 connection: a request head must fit. Half a head of this length on every allowed connection
/// must fit into the memory of a router.
const BUFFER_BYTES_MAX: usize = 16 << 10;

/// Largest head of an HTTP/2 request. Received heads are stored before they can be counted, those of all streams of a
/// connection.
const HEAD_BYTES_MAX: u32 = 8 << 10;

/// hyper does not notice the end of an HTTP/1 connection while bytes of it are unread: a pipelined request or a stray
/// line end. So this task checks the socket at this interval. It gives answers that are nearly complete one interval to
/// finish, since a client that has closed its side may still read.
const LEFT_SEEN_EVERY: Duration = Duration::from_secs(2);
const LEFT_GRACE: Duration = Duration::from_secs(2);

/// Serves `routes` until `stop` is cancelled. Then idle connections close, and it returns once requests in flight have
/// ended. Dropping it ends every connection. Requests carry their sender, as in gRPC ([`Peer`](super::Peer)). A
/// connection without a complete request head for `idle_max` closes; this applies to the first request and to later
/// ones. If the peer disconnects, the connection and its request end.
pub async fn serve_http(
    listener: Listener,
    callers: Callers,
    routes: Router,
    idle_max: Duration,
    stop: CancellationToken,
) {
    serve(Incoming::new(listener, callers), routes, builder(idle_max), None, stop).await;
}

/// The same over HTTP/1 only, for routes with short, immediate answers, so that no connection holds more than one. When
/// all places are taken, the client with the most connections loses its oldest one.
pub async fn serve_probes(listener: Listener, routes: Router, idle_max: Duration, stop: CancellationToken) {
    let bounded = OpenConnections { max: listener.connections_max(), open: BTreeMap::new(), taken: 0 };
    let incoming = Incoming::new(listener, Callers::default());
    serve(incoming, routes, builder(idle_max).http1_only(), Some(bounded), stop).await;
}

/// Open connections, in order of arrival.
struct OpenConnections {
    max: usize,
    open: BTreeMap<u64, (Option<Client>, JoinHandle<()>)>,
    taken: u64,
}

impl OpenConnections {
    /// Adds a connection; if it took the last place, another one is closed.
    fn add(&mut self, client: Option<Client>, task: JoinHandle<()>) {
        self.open.retain(|_, (_, task)| !task.is_finished());
        self.taken += 1;
        self.open.insert(self.taken, (client, task));
        if self.open.len() >= self.max
            && let Some((oldest, _)) = place_to_free(self.open.iter().map(|(number, (client, _))| (*number, client)))
            && let Some((_, task)) = self.open.remove(&oldest)
        {
            task.abort();
        }
    }
}

fn builder(idle_max: Duration) -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(idle_max).max_buf_size(BUFFER_BYTES_MAX);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_millis(KEEPALIVE_MS))
        .keep_alive_timeout(Duration::from_millis(KEEPALIVE_WAIT_MS))
        .max_header_list_size(HEAD_BYTES_MAX)
        .max_pending_accept_reset_streams(RESET_STREAMS_MAX)
        .max_local_error_reset_streams(LOCAL_RESETS_MAX);
    http
}

async fn serve(
    mut incoming: Incoming,
    routes: Router,
    http: auto::Builder<TokioExecutor>,
    mut bounded: Option<OpenConnections>,
    stop: CancellationToken,
) {
    let (connections, ended) = (TaskTracker::new(), CancellationToken::new());
    let _ended = ended.clone().drop_guard();
    while let Some(connection) = stop.run_until_cancelled(incoming.next()).await {
        let (http, stop, ended) = (http.clone(), stop.clone(), ended.clone());
        let (peer, routes) = (connection.connect_info(), routes.clone());
        let client = peer.addresses.remote_addr().map(|address| Client::at(address.ip()));
        let service = service_fn(move |mut request: Request<body::Incoming>| {
            request.extensions_mut().insert(peer.clone());
            // Always ready.
            routes.clone().call(request)
        });
        let task = connections.spawn(async move {
            let peer = connection.socket();
            let mut served = pin!(http.serve_connection(TokioIo::new(connection), service));
            let result = async {
                tokio::select! {
                    result = served.as_mut() => return result,
                    () = stop.cancelled() => served.as_mut().graceful_shutdown(),
                }
                served.await
            };
            tokio::select! {
                result = result => {
                    if let Err(error) = result {
                        tracing::debug!(%error, "an HTTP connection ended");
                    }
                }
                () = peer.left(LEFT_SEEN_EVERY, LEFT_GRACE) => {}
                () = ended.cancelled() => {}
            }
        });
        if let Some(open) = &mut bounded {
            open.add(client, task);
        }
    }
    drop(incoming);
    connections.close();
    connections.wait().await;
}
