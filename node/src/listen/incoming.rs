//! Connections of a listener, once their handshakes are complete.

use super::handshakes::Handshakes;
use super::{Connection, Listener};
use crate::identity::{ClientProtocol, Identity, Protocol, ServerTls};
use rustls::ServerConfig;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Failed handshakes are logged no more often than this, since anyone who reaches the port can cause them repeatedly.
const LOGGED_EVERY: Duration = Duration::from_secs(60);

/// Who connects to a listener, and how.
#[derive(Clone, Debug)]
pub enum Callers {
    /// Processes of this cluster, which prove it if there is an identity.
    Peers(Identity),
    /// Anyone. They see a certificate, if there is one.
    Clients(ServerTls, ClientProtocol),
}

/// What a handshake asks for.
pub(crate) struct Terms {
    pub(super) tls: Arc<ServerConfig>,
    /// Whether the peer proves its roles: one that does not has none.
    pub(super) proves_roles: bool,
}

/// Anyone, in the clear.
impl Default for Callers {
    fn default() -> Self {
        Self::Clients(ServerTls::default(), ClientProtocol::Http)
    }
}

impl Callers {
    fn terms(&self) -> Option<Terms> {
        match self {
            Self::Peers(identity) => identity.server(Protocol::Grpc).map(|tls| Terms { tls, proves_roles: true }),
            Self::Clients(tls, protocol) => tls.now(*protocol).map(|tls| Terms { tls, proves_roles: false }),
        }
    }
}

/// The connections of a listener. The listener bounds their number, including the few in handshakes.
pub(crate) struct Incoming {
    listener: Listener,
    callers: Callers,
    handshakes: Handshakes,
    failed: Failed,
}

impl Incoming {
    pub(crate) fn new(listener: Listener, callers: Callers) -> Self {
        let handshakes = Handshakes::new(listener.connections_max());
        Self { listener, callers, handshakes, failed: Failed::default() }
    }

    /// The next connection: with TLS, after its handshake.
    pub(crate) async fn next(&mut self) -> Connection {
        loop {
            tokio::select! {
                connection = self.listener.accept() => match self.callers.terms() {
                    None => return connection,
                    Some(terms) => self.handshakes.begin(connection, terms),
                },
                Some(done) = self.handshakes.next() => match done {
                    Ok(Ok(connection)) => return connection,
                    Ok(Err(error)) => self.failed.note(&error, &self.callers),
                    Err(panic) => self.failed.note(&panic, &self.callers),
                },
            }
        }
    }
}

/// Handshakes that failed.
#[derive(Default)]
struct Failed {
    since: u64,
    logged_at: Option<Instant>,
}

impl Failed {
    fn note(&mut self, error: &dyn std::error::Error, callers: &Callers) {
        self.since += 1;
        if self.logged_at.is_some_and(|at| at.elapsed() < LOGGED_EVERY) {
            return;
        }
        let refused = self.since;
        match callers {
            Callers::Peers(_) => {
                tracing::warn!(refused, %error, "refuses connections that do not prove to be of this cluster");
            }
            Callers::Clients(..) => {
                tracing::warn!(refused, %error, "refuses clients without TLS 1.3: the scheme of this port is https");
            }
        }
        (self.since, self.logged_at) = (0, Some(Instant::now()));
    }
}
