//! The router's side: the lease table behind a gRPC service.

use super::member_updates::member_updates;
use super::session::Session;
use crate::membership::embedded::LeaseConfig;
use crate::membership::{JoinError, LeaseTable, MembershipView, Registration, RouterMembership};
use baton_proto::convert;
use baton_proto::v1::membership_server::{Membership, MembershipServer};
use baton_proto::v1::{self, join_request, join_response};
use baton_types::{ErrorKind, InstanceId, InstanceRecord, Party, ProtocolRange, RequestError};
use futures::stream::BoxStream;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, Streaming};

/// Messages that wait for one worker: a heartbeat for each of the worker's own, and few others.
const OUTBOX_MAX: usize = 16;

/// The service where workers register.
pub type JoinService = MembershipServer<EmbeddedRouter>;

/// The leases of one router. Cloning shares them.
#[derive(Clone, Debug)]
pub struct EmbeddedRouter(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) lease: Duration,
    protocol: ProtocolRange,
    inner: Mutex<Inner>,
    view: watch::Sender<Arc<MembershipView>>,
    closed: CancellationToken,
}

#[derive(Debug)]
struct Inner {
    table: LeaseTable,
    outboxes: BTreeMap<InstanceId, Outbox>,
}

#[derive(Debug)]
struct Outbox {
    registration: Registration,
    messages: mpsc::Sender<Result<v1::JoinResponse, Status>>,
    /// Ends the session when the outbox is dropped.
    _session: DropGuard,
}

impl EmbeddedRouter {
    /// An empty lease table.
    pub fn new(config: &LeaseConfig) -> Self {
        let lease = Duration::from_millis(config.lease_ms);
        // Revisions start at the clock, so that they still grow after the router restarts.
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let table = LeaseTable::new(lease, config.members_max, start);
        let view = watch::Sender::new(Arc::new(table.view()));
        Self(Arc::new(Shared {
            lease,
            protocol: config.protocol,
            inner: Mutex::new(Inner { table, outboxes: BTreeMap::new() }),
            view,
            closed: CancellationToken::new(),
        }))
    }

    /// The gRPC service, to be added to the router's server.
    pub fn service(&self) -> JoinService {
        MembershipServer::new(self.clone())
    }

    /// Ends all sessions, so that a draining server does not wait for them. Workers keep their readiness and register
    /// elsewhere.
    pub fn close(&self) {
        self.0.closed.cancel();
    }
}

impl RouterMembership for EmbeddedRouter {
    fn view(&self) -> watch::Receiver<Arc<MembershipView>> {
        self.0.view.subscribe()
    }

    fn admit(&self, party: &Party) -> bool {
        self.0.tell(party, join_response::Message::Admitted(v1::Admitted {}))
    }

    fn evict(&self, party: &Party, reason: &str) -> bool {
        let reason = reason.chars().take(512).collect();
        self.0.tell(party, join_response::Message::Evicted(v1::Evicted { reason }))
    }
}

impl Shared {
    /// Registers a worker and gives its session an outbox; an older session of the instance loses its outbox and ends.
    /// The registration is the first message.
    fn join(
        &self,
        record: InstanceRecord,
        messages: mpsc::Sender<Result<v1::JoinResponse, Status>>,
        session: DropGuard,
    ) -> Result<Registration, JoinError> {
        let instance = record.party.instance.clone();
        let mut inner = self.inner.lock();
        let registration = inner.table.join(record, Instant::now().into_std())?;
        inner.outboxes.insert(instance.clone(), Outbox { registration, messages, _session: session });
        let registered = v1::Registered { lease_ms: self.lease.as_millis() as u64, revision: registration.revision };
        inner.send(&instance, registration, join_response::Message::Registered(registered));
        self.publish(&mut inner);
        Ok(registration)
    }

    /// Renews the lease and answers; `false` if the session has ended.
    pub(super) fn heartbeat(&self, instance: &InstanceId, registration: Registration) -> bool {
        let mut inner = self.inner.lock();
        let alive = inner.table.heartbeat(instance, registration, Instant::now().into_std());
        self.publish(&mut inner);
        alive && inner.send(instance, registration, join_response::Message::Heartbeat(v1::Heartbeat {}))
    }

    /// When the lease ends without a heartbeat; `None` if it has ended.
    pub(super) fn expires(&self, instance: &InstanceId, registration: Registration) -> Option<Instant> {
        self.inner.lock().table.expires(instance, registration).map(Instant::from_std)
    }

    pub(super) fn leave(&self, instance: &InstanceId, registration: Registration) {
        let mut inner = self.inner.lock();
        inner.table.leave(instance, registration);
        self.publish(&mut inner);
    }

    pub(super) fn expire(&self) {
        let mut inner = self.inner.lock();
        inner.table.expire(Instant::now().into_std());
        self.publish(&mut inner);
    }

    fn tell(&self, party: &Party, message: join_response::Message) -> bool {
        let inner = self.inner.lock();
        let registration = inner.outboxes.get(&party.instance).map(|o| o.registration);
        registration
            .filter(|r| r.incarnation == party.incarnation)
            .is_some_and(|r| inner.send(&party.instance, r, message))
    }

    /// Publishes the view if it changed, and drops outboxes without a registration.
    fn publish(&self, inner: &mut Inner) {
        if self.view.borrow().revision != inner.table.revision() {
            let view = inner.table.view();
            inner
                .outboxes
                .retain(|id, outbox| view.members.get(id).is_some_and(|m| m.registration == outbox.registration));
            self.view.send_replace(Arc::new(view));
        }
    }
}

impl Inner {
    /// `false` if the worker does not read: then its session has ended.
    fn send(&self, instance: &InstanceId, registration: Registration, message: join_response::Message) -> bool {
        let outbox = self.outboxes.get(instance).filter(|o| o.registration == registration);
        outbox.is_some_and(|o| o.messages.try_send(Ok(v1::JoinResponse { message: Some(message) })).is_ok())
    }
}

#[tonic::async_trait]
impl Membership for EmbeddedRouter {
    type JoinStream = BoxStream<'static, Result<v1::JoinResponse, Status>>;

    async fn join(&self, request: Request<Streaming<v1::JoinRequest>>) -> Result<Response<Self::JoinStream>, Status> {
        if self.0.closed.is_cancelled() {
            return Err(Status::unavailable("this router stops"));
        }
        let mut requests = request.into_inner();
        let first = tokio::time::timeout(self.0.lease, requests.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no record within the lease"))??;
        let Some(join_request::Message::Record(record)) = first.and_then(|r| r.message) else {
            return Err(Status::invalid_argument("the first message must be the record"));
        };
        let record = InstanceRecord::try_from(record).map_err(|e| e.within("record"))?;
        check_protocol(&record, self.0.protocol)?;
        let (party, role, endpoint) = (record.party.clone(), record.role, record.endpoint.clone());

        let (messages, outbox) = mpsc::channel(OUTBOX_MAX);
        let alive = self.0.closed.child_token();
        let registration = self.0.join(record, messages, alive.clone().drop_guard()).map_err(|error| {
            tracing::warn!(instance = %party, endpoint, %error, "refuses a registration");
            refusal(&error)
        })?;
        tracing::info!(instance = %party, role = role.name(), endpoint, revision = registration.revision, "registers an instance");
        tokio::spawn(Session { shared: self.0.clone(), party, registration }.run(requests, alive));
        Ok(Response::new(member_updates(outbox, self.0.view.subscribe())))
    }
}

fn check_protocol(record: &InstanceRecord, ours: ProtocolRange) -> Result<(), Status> {
    if record.protocol.common(ours).is_some() {
        return Ok(());
    }
    let message = format!("the worker speaks protocols {}, this router {ours}", record.protocol);
    Err(convert::status::from_error(&RequestError::invalid("record.protocol", message)))
}

fn refusal(error: &JoinError) -> Status {
    match error {
        JoinError::Replaced { .. } | JoinError::Duplicate { .. } => Status::already_exists(error.to_string()),
        JoinError::Full { .. } => {
            convert::status::from_error(&RequestError::new(ErrorKind::Overloaded, error.to_string()))
        }
    }
}
