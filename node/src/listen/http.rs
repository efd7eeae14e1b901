//! An HTTP server over a listener, with the bounds that `axum::serve` has no settings for.

use super::{LOCAL_RESETS_MAX, Listener, RESET_STREAMS_MAX};
use crate::grpc::{KEEPALIVE_MS, KEEPALIVE_WAIT_MS};
use crate::intake::Client;
use axum::Router;
use baton_types::places::place_to_free;
use hyper::Request;
use hyper::body::Incoming;
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

/// What is read of an HTTP/1 connection ahead of what it is served: a head has to fit. As many connections as there may be, each with half a
/// head of this length, are to fit into the memory of a router.
const BUFFER_BYTES_MAX: usize = 16 << 10;

/// The head of an HTTP/2 request. Heads that have come are kept before anything may count them, those of all streams of a connection.
const HEAD_BYTES_MAX: u32 = 8 << 10;

/// hyper does not look for the end of an HTTP/1 connection while bytes of it lie unread, those of a pipelined request or a stray line end. So
/// this looks beside it, so often, and gives answers that are nearly done so long to leave: who has closed its side may still read.
const LEFT_SEEN_EVERY: Duration = Duration::from_secs(2);
const LEFT_GRACE: Duration = Duration::from_secs(2);

/// Serves `routes` until `stop` is cancelled; then idle connections close, and it returns once requests in flight have ended. Dropping it
/// ends every connection. Requests tell who sent them, as those of gRPC do ([`Peer`](super::Peer)). One that brings no whole request head for
/// `idle_max` closes, be it the first or the next; one whose peer left ends, and what it asked for with it.
pub async fn serve_http(listener: Listener, routes: Router, idle_max: Duration, stop: CancellationToken) {
    serve(listener, routes, builder(idle_max), None, stop).await;
}

/// The same over HTTP/1 alone, for routes whose answers are short and come at once, so that no connection holds more than one. Where they take
/// all places, one gives way: the oldest of whoever holds most.
pub async fn serve_probes(listener: Listener, routes: Router, idle_max: Duration, stop: CancellationToken) {
    let bounded = OpenConnections { max: listener.connections_max(), open: BTreeMap::new(), taken: 0 };
    serve(listener, routes, builder(idle_max).http1_only(), Some(bounded), stop).await;
}

/// Connections that are open, in the order in which they came.
struct OpenConnections {
    max: usize,
    open: BTreeMap<u64, (Option<Client>, JoinHandle<()>)>,
    taken: u64,
}

impl OpenConnections {
    /// Takes one more in; where that was the last place, one gives way.
    fn add(&mut self, client: Option<Client>, task: JoinHandle<()>) {
        self.open.retain(|_, (_, task)| !task.is_finished());
        self.taken += 1;
        self.open.insert(self.taken, (client, task));
        if self.open.len() >= self.max
            && let Some(oldest) = place_to_free(self.open.iter().map(|(number, (client, _))| (*number, client)))
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
    listener: Listener,
    routes: Router,
    http: auto::Builder<TokioExecutor>,
    mut bounded: Option<OpenConnections>,
    stop: CancellationToken,
) {
    let (connections, ended) = (TaskTracker::new(), CancellationToken::new());
    let _ended = ended.clone().drop_guard();
    while let Some(connection) = stop.run_until_cancelled(listener.accept()).await {
        let (http, stop, ended) = (http.clone(), stop.clone(), ended.clone());
        let (peer, routes) = (connection.connect_info(), routes.clone());
        let client = peer.addresses.remote_addr().map(|address| Client::at(address.ip()));
        let service = service_fn(move |mut request: Request<Incoming>| {
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
    drop(listener);
    connections.close();
    connections.wait().await;
}
