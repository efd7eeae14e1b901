//! The worker's side: one task per router registers, keeps the lease, and registers again after a loss.

use crate::backoff::Backoff;
use crate::grpc::{Channel, ChannelConfig, ChannelError, channel};
use crate::identity::{Identity, Role};
use crate::membership::embedded::JoinConfig;
use crate::membership::members::Change;
use crate::membership::state::RouterVerdict;
use crate::membership::{Members, RegistrationHandle, RouterReport, WorkerMembership, WorkerState, aggregate};
use baton_proto::v1::membership_client::MembershipClient;
use baton_proto::v1::{self, join_request, join_response};
use baton_types::{InstanceRecord, Party};
use futures::future::join_all;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

/// Messages that wait for one router; more than a few mean that it does not read.
const OUTBOX_MAX: usize = 4;

/// How to reach a router by its address. Each call opens a new connection.
pub type Connect = Arc<dyn Fn(&str) -> Result<Channel, ChannelError> + Send + Sync>;

/// Registers with routers.
#[derive(Clone)]
pub struct EmbeddedWorker {
    config: JoinConfig,
    connect: Connect,
    members: Members,
}

impl fmt::Debug for EmbeddedWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedWorker").field("config", &self.config).finish_non_exhaustive()
    }
}

impl EmbeddedWorker {
    /// Connects over TCP, as the worker with this identity.
    pub fn new(config: &JoinConfig, identity: &Identity) -> Self {
        let settings = ChannelConfig { connect_ms_max: config.connect_ms_max, ..ChannelConfig::default() };
        let identity = identity.clone();
        Self::with_connect(config, Arc::new(move |address| channel(address, &settings, &identity, Role::Router)))
    }

    /// Uses connections that the caller opens.
    pub fn with_connect(config: &JoinConfig, connect: Connect) -> Self {
        Self { config: config.clone(), connect, members: Members::default() }
    }
}

impl WorkerMembership for EmbeddedWorker {
    fn register(&self, record: InstanceRecord) -> RegistrationHandle {
        let leave = CancellationToken::new();
        let verdicts = watch::Sender::new(vec![RouterReport::default(); self.config.routers.len()]);
        let (state, state_seen) = watch::channel(WorkerState::default());
        let verdicts = Arc::new((verdicts, state));
        let routers = self.config.routers.iter().enumerate().map(|(index, address)| Membership {
            address: address.clone(),
            index,
            config: self.config.clone(),
            connect: self.connect.clone(),
            record: record.clone().into(),
            members: self.members.clone(),
            verdicts: verdicts.clone(),
            leave: leave.clone(),
        });
        let all = join_all(routers.map(Membership::keep).collect::<Vec<_>>());
        let task = tokio::spawn(async move {
            all.await;
        });
        RegistrationHandle::new(state_seen, leave, task)
    }

    fn members(&self) -> Members {
        self.members.clone()
    }
}

/// The registration at one router.
struct Membership {
    address: String,
    index: usize,
    config: JoinConfig,
    connect: Connect,
    record: v1::InstanceRecord,
    members: Members,
    verdicts: Arc<(watch::Sender<Vec<RouterReport>>, watch::Sender<WorkerState>)>,
    leave: CancellationToken,
}

impl Membership {
    async fn keep(self) {
        let (min, max) = (self.config.backoff_ms_min, self.config.backoff_ms_max);
        let mut backoff = Backoff::new(Duration::from_millis(min), Duration::from_millis(max));
        while !self.leave.is_cancelled() {
            let mut registered = false;
            let end = self.session(&mut registered).await;
            self.update_report(|o| o.connected = false);
            if registered {
                backoff.reset();
            }
            let Err(status) = end else { break };
            self.note(&status, &mut backoff);
            tokio::select! {
                () = self.leave.cancelled() => break,
                () = tokio::time::sleep(backoff.wait()) => {}
            }
        }
        self.update_report(|o| *o = RouterReport::default());
    }

    /// One stream, from registration to its end. `Ok` if this worker left.
    async fn session(&self, registered: &mut bool) -> Result<(), Status> {
        let deadline = Instant::now() + Duration::from_millis(self.config.connect_ms_max);
        let late = |_| Status::deadline_exceeded("no answer to the registration");
        let (outbox, requests) = mpsc::channel(OUTBOX_MAX);
        send(&outbox, join_request::Message::Record(self.record.clone()))?;
        let join = async {
            let channel = (self.connect)(&self.address).map_err(|e| Status::invalid_argument(e.to_string()))?;
            let mut responses = MembershipClient::new(channel).join(ReceiverStream::new(requests)).await?.into_inner();
            match responses.message().await?.and_then(|r| r.message) {
                Some(join_response::Message::Registered(registered)) => Ok((responses, registered)),
                _ => Err(Status::internal("the router did not answer with a registration")),
            }
        };
        let (mut responses, answer) = tokio::select! {
            joined = timeout_at(deadline, join) => joined.map_err(late)??,
            () = self.leave.cancelled() => return Ok(()),
        };
        *registered = true;
        self.update_report(|o| o.connected = true);
        tracing::info!(router = self.address, lease_ms = answer.lease_ms, revision = answer.revision, "is registered");
        self.follow(&mut responses, outbox, Duration::from_millis(answer.lease_ms.clamp(10, 3_600_000))).await
    }

    async fn follow(
        &self,
        responses: &mut Streaming<v1::JoinResponse>,
        outbox: mpsc::Sender<v1::JoinRequest>,
        lease: Duration,
    ) -> Result<(), Status> {
        let mut beat = tokio::time::interval_at(Instant::now() + lease / 3, lease / 3);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut silent_until = Instant::now() + lease;
        loop {
            tokio::select! {
                () = self.leave.cancelled() => return self.say_goodbye(responses, outbox).await,
                _ = beat.tick() => send(&outbox, join_request::Message::Heartbeat(v1::Heartbeat {}))?,
                message = timeout_at(silent_until, responses.message()) => {
                    let message = message.map_err(|_| Status::deadline_exceeded("the router was silent for a lease"))??;
                    let message = message.ok_or_else(|| Status::unavailable("the router ended the stream"))?;
                    silent_until = Instant::now() + lease;
                    match message.message {
                        Some(join_response::Message::Admitted(_)) => {
                            tracing::info!(router = self.address, "is admitted");
                            self.update_report(|o| o.verdict = Some(RouterVerdict::Admitted));
                        }
                        Some(join_response::Message::Evicted(v1::Evicted { reason })) => {
                            tracing::warn!(router = self.address, reason, "is evicted");
                            self.update_report(|o| o.verdict = Some(RouterVerdict::Evicted(reason)));
                        }
                        Some(join_response::Message::Members(members)) => self.know(members),
                        // Heartbeats, and messages of a newer protocol.
                        _ => {}
                    }
                }
            }
        }
    }

    /// Applies the router's list of other members. The last list stays valid when the router cannot be reached any
    /// more.
    fn know(&self, said: v1::Members) {
        // Invalid names are ignored.
        let joined = said.joined.into_iter().filter_map(|party| Party::try_from(party).ok()).collect();
        let change = Change { anew: said.anew, joined, left: said.left };
        let members_max = self.config.members_max;
        if !self.members.change(self.index, change, members_max) {
            tracing::warn!(
                router = self.address,
                members_max,
                "knows no more workers (membership.members_max); who is left out reads nothing here"
            );
        }
    }

    /// Leaves, and waits for the router to end the stream.
    async fn say_goodbye(
        &self,
        responses: &mut Streaming<v1::JoinResponse>,
        outbox: mpsc::Sender<v1::JoinRequest>,
    ) -> Result<(), Status> {
        send(&outbox, join_request::Message::Leave(v1::Leave {}))?;
        drop(outbox);
        let drained = async { while let Ok(Some(_)) = responses.message().await {} };
        // No answer is acceptable: the stream ends with this task, and the registration with the stream.
        let _ = timeout(Duration::from_millis(self.config.connect_ms_max), drained).await;
        tracing::info!(router = self.address, "left");
        Ok(())
    }

    /// Logs a failure once, and treats a refusal as an eviction.
    fn note(&self, status: &Status, backoff: &mut Backoff<(Code, String)>) {
        let refused = matches!(status.code(), Code::AlreadyExists | Code::InvalidArgument | Code::FailedPrecondition);
        if refused {
            self.update_report(|o| o.verdict = Some(RouterVerdict::Evicted(status.message().into())));
        }
        if backoff.is_news((status.code(), status.message().to_owned())) {
            tracing::warn!(router = self.address, code = ?status.code(), problem = status.message(), "is not registered; joins again");
        }
    }

    fn update_report(&self, change: impl FnOnce(&mut RouterReport)) {
        let (verdicts, state) = &*self.verdicts;
        verdicts.send_modify(|all| change(&mut all[self.index]));
        let sum = aggregate(&verdicts.borrow());
        state.send_if_modified(|state| std::mem::replace(state, sum.clone()) != sum);
    }
}

fn send(outbox: &mpsc::Sender<v1::JoinRequest>, message: join_request::Message) -> Result<(), Status> {
    let stuck = |_| Status::unavailable("the router does not read");
    outbox.try_send(v1::JoinRequest { message: Some(message) }).map_err(stuck)
}
