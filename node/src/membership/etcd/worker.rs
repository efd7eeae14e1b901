//! The worker's side: keeps the record on a lease, and follows the routers' verdicts.

use super::EtcdConfig;
use super::claim::{Claim, Holder, Standing, claim};
use super::cluster_check::ClusterCheck;
use super::connection::{Node, within};
use super::error::EtcdError;
use super::keys::{Keys, decode_record};
use super::lease::{Lease, Renewal, connect_for, give_back};
use super::router::EtcdRouter;
use super::verdicts::Verdicts;
use crate::membership::{Members, RegistrationHandle, RouterMembership as _, WorkerMembership, WorkerState};
use baton_proto::convert::stored::{decode_verdict, encode_record};
use baton_types::InstanceRecord;
use etcd_client::{
    Client, Compare, CompareOp, EventType, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse, WatchOptions,
    WatchStream,
};
use std::ops::ControlFlow;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Registers in etcd.
#[derive(Clone, Debug)]
pub struct EtcdWorker {
    config: EtcdConfig,
    members_max: usize,
    members: Members,
}

impl EtcdWorker {
    /// Connects at the first registration; stores at most `members_max` other workers.
    pub fn new(config: &EtcdConfig, members_max: usize) -> Self {
        Self { config: config.clone(), members_max, members: Members::default() }
    }
}

impl WorkerMembership for EtcdWorker {
    fn register(&self, record: InstanceRecord) -> RegistrationHandle {
        let leave = CancellationToken::new();
        let (state, seen) = watch::channel(WorkerState::default());
        let keeper = Keeper {
            keys: Keys(self.config.prefix.clone()),
            config: self.config.clone(),
            record,
            node: Node::any(),
            lease: None,
            held_before: false,
            verdicts: Verdicts::default(),
            cluster_check: ClusterCheck::default(),
            state,
            leave: leave.clone(),
        };
        let others = EtcdRouter::look_on(&self.config, self.members_max);
        tokio::spawn(know(others, self.members.clone(), leave.clone()));
        RegistrationHandle::new(seen, leave, tokio::spawn(keeper.run()))
    }

    fn members(&self) -> Members {
        self.members.clone()
    }
}

/// Keeps `members` up to date with the records, until this worker leaves.
async fn know(others: EtcdRouter, members: Members, leave: CancellationToken) {
    let mut view = others.view();
    let follow = async {
        loop {
            let known = view.borrow_and_update().clone();
            members.replace(0, known.members.values().map(|member| member.record.party.clone()));
            if view.changed().await.is_err() {
                return;
            }
        }
    };
    leave.run_until_cancelled(follow).await;
}

/// Keeps one registration.
struct Keeper {
    config: EtcdConfig,
    keys: Keys,
    record: InstanceRecord,
    node: Node,
    /// Outlives sessions: a lost connection does not end it.
    lease: Option<Lease>,
    held_before: bool,
    verdicts: Verdicts,
    cluster_check: ClusterCheck,
    state: watch::Sender<WorkerState>,
    leave: CancellationToken,
}

impl Keeper {
    async fn run(mut self) {
        let mut backoff = self.config.backoff();
        let leave = self.leave.clone();
        while !leave.is_cancelled() {
            let mut worked = false;
            let end = tokio::select! {
                end = self.session(&mut worked) => end,
                () = leave.cancelled() => break,
            };
            let Err(error) = end;
            self.node = self.node.next();
            if matches!(error, EtcdError::LeaseGone) {
                self.lease = None;
            }
            tokio::select! {
                () = tokio::time::sleep(error.wait(&mut backoff, worked)) => {}
                () = leave.cancelled() => break,
            }
        }
        if give_back(self.lease, &self.config, self.node).await {
            tracing::info!("left");
        }
        self.state.send_replace(WorkerState::Unregistered);
    }

    /// From connecting to the first failure. `worked` becomes true once the name was read.
    async fn session(&mut self, worked: &mut bool) -> Result<std::convert::Infallible, EtcdError> {
        let client = connect_for(self.lease, &self.config, self.node).await?;
        self.cluster_check.check(&self.config, self.node, &client).await?;
        let mut renewal = Renewal::start(&mut self.lease, &client, &self.config).await?;
        let lease = renewal.lease().id;
        let (cluster_check, config, node) = (self.cluster_check.clone(), self.config.clone(), self.node);
        let end = tokio::select! {
            error = renewal.keep() => Err(error),
            end = cluster_check.keep(&config, node, &client) => end,
            end = self.follow(&client, lease, worked) => end,
        };
        self.lease = Some(renewal.lease());
        end
    }

    async fn follow(
        &mut self,
        client: &Client,
        lease: i64,
        worked: &mut bool,
    ) -> Result<std::convert::Infallible, EtcdError> {
        let max = self.config.request_max();
        loop {
            let revision = match self.settle(client, lease).await? {
                ControlFlow::Break(revision) => revision,
                // Another process wrote in between: read again.
                ControlFlow::Continue(()) => continue,
            };
            *worked = true;
            let own = self.keys.instance(&self.record.party.instance);
            let verdicts = self.keys.verdicts(&self.record.party);
            let from = WatchOptions::new().with_start_revision(revision + 1);
            let mut watches = client.watch_client();
            let mut record = within(max, "watch", watches.watch(own, Some(from.clone()))).await?;
            let mut verdicts_seen =
                within(max, "watch", watches.watch(verdicts.clone(), Some(from.with_prefix()))).await?;
            loop {
                tokio::select! {
                    changed = next(&mut record) => {
                        // Taken over, deleted, or the end of the lease: the next read shows which.
                        if !changed?.is_empty() {
                            break;
                        }
                    }
                    changed = next(&mut verdicts_seen) => {
                        for (event, kv) in changed? {
                            self.hear(&verdicts, event, &kv);
                        }
                    }
                }
            }
        }
    }

    /// Reads the name and writes the record if allowed; returns the revision up to which the state is known.
    async fn settle(&mut self, client: &Client, lease: i64) -> Result<ControlFlow<i64>, EtcdError> {
        let max = self.config.request_max();
        let own = self.keys.instance(&self.record.party.instance);
        let verdicts = self.keys.verdicts(&self.record.party);
        let reads =
            [TxnOp::get(own.clone(), None), TxnOp::get(verdicts.clone(), Some(GetOptions::new().with_prefix()))];
        let answer = within(max, "read", client.kv_client().txn(Txn::new().and_then(reads))).await?;
        let revision = answer.header().map_or(0, |h| h.revision());
        let mut gets = answer.op_responses().into_iter().filter_map(|r| match r {
            TxnOpResponse::Get(get) => Some(get.kvs().to_vec()),
            _ => None,
        });
        let found = gets.next().unwrap_or_default().first().map(|kv| self.standing(kv));
        let said = gets.next().unwrap_or_default();
        let said = said.iter().filter_map(|kv| Some((router_of(&verdicts, kv)?, decode_verdict(kv.value())?)));
        match claim(&self.record, lease, self.held_before, found.as_ref()) {
            Claim::Held(registered) => {
                self.held_before = true;
                self.verdicts.listed(said.collect());
                self.verdicts.registered();
                self.publish();
                tracing::info!(revision = registered, "is registered");
                Ok(ControlFlow::Break(revision))
            }
            Claim::Refused(error) => {
                tracing::warn!(%error, "is not registered; waits for the name");
                self.verdicts.refused(error.to_string());
                self.publish();
                Ok(ControlFlow::Break(revision))
            }
            Claim::Write(at) => {
                if let Some(Standing { holder: Err(problem), lease: standing_on, .. }) = &found {
                    tracing::warn!(
                        key = own,
                        lease = standing_on,
                        problem,
                        "takes its name over from a record that cannot be read"
                    );
                }
                let unchanged = Compare::mod_revision(own.clone(), CompareOp::Equal, at);
                let options = PutOptions::new().with_lease(lease);
                let put = TxnOp::put(own, encode_record(&self.record), Some(options));
                let write = Txn::new().when([unchanged]).and_then([put]);
                within(max, "register", client.kv_client().txn(write)).await.map_err(lease_lost)?;
                Ok(ControlFlow::Continue(()))
            }
        }
    }

    fn standing(&self, kv: &KeyValue) -> Standing {
        let record = decode_record(self.record.party.instance.as_str().as_bytes(), kv.value());
        let holder = record.map(|record| Holder { party: record.party, endpoint: record.endpoint });
        Standing { holder, lease: kv.lease(), revision: kv.mod_revision() }
    }

    fn hear(&mut self, verdicts: &str, event: EventType, kv: &KeyValue) {
        let Some(router) = router_of(verdicts, kv) else { return };
        match (event, decode_verdict(kv.value())) {
            (EventType::Put, Some(verdict)) => {
                tracing::info!(router, ?verdict, "hears from a router");
                self.verdicts.said(router, verdict);
            }
            (EventType::Put, None) => {}
            (EventType::Delete, _) => self.verdicts.lost(&router),
        }
        self.publish();
    }

    fn publish(&self) {
        let now = self.verdicts.state();
        self.state.send_if_modified(|known| std::mem::replace(known, now.clone()) != now);
    }
}

fn router_of(verdicts: &str, kv: &KeyValue) -> Option<String> {
    kv.key_str().ok()?.strip_prefix(verdicts).map(str::to_owned)
}

/// The error of a write with an ended lease.
fn lease_lost(error: EtcdError) -> EtcdError {
    match error {
        EtcdError::Failed(etcd_client::Error::GRpcStatus(status)) if status.code() == tonic::Code::NotFound => {
            EtcdError::LeaseGone
        }
        other => other,
    }
}

/// The next events of a watch; an empty list for a progress notification.
async fn next(watch: &mut WatchStream) -> Result<Vec<(EventType, KeyValue)>, EtcdError> {
    let Some(response) = watch.message().await? else { return Err(EtcdError::WatchEnded("its stream ended".into())) };
    if response.canceled() {
        return Err(EtcdError::WatchEnded(response.cancel_reason().to_owned()));
    }
    Ok(response.events().iter().filter_map(|e| Some((e.event_type(), e.kv()?.clone()))).collect())
}
