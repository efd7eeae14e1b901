//! One worker's stream on the router's side. It ends when the worker leaves, with the stream, with the lease, or when a newer session
//! takes over.

use super::router::Shared;
use crate::membership::Registration;
use baton_proto::v1::{self, join_request};
use baton_types::Party;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) party: Party,
    pub(super) registration: Registration,
}

impl Session {
    /// Also ends the registration. `replaced` is cancelled if a newer session has already done so, or if the router
    /// stops.
    pub(super) async fn run(self, requests: Streaming<v1::JoinRequest>, replaced: CancellationToken) {
        let end = tokio::select! {
            end = self.follow(requests) => end,
            () = replaced.cancelled() => "a newer registration took over, or the router stops",
        };
        tracing::info!(instance = %self.party, revision = self.registration.revision, reason = end, "ends a registration");
        self.shared.leave(&self.party.instance, self.registration);
    }

    async fn follow(&self, mut requests: Streaming<v1::JoinRequest>) -> &'static str {
        let instance = &self.party.instance;
        loop {
            let Some(expires) = self.shared.expires(instance, self.registration) else {
                return "a newer registration took over";
            };
            match tokio::time::timeout_at(expires, requests.message()).await {
                Err(_) => {
                    self.shared.expire();
                    return "the lease ended: the worker was silent";
                }
                Ok(Ok(Some(v1::JoinRequest { message: Some(join_request::Message::Heartbeat(_)) }))) => {
                    if !self.shared.heartbeat(instance, self.registration) {
                        return "a newer registration took over, or the worker does not read";
                    }
                }
                Ok(Ok(Some(v1::JoinRequest { message: Some(join_request::Message::Leave(_)) }))) => {
                    return "the worker left";
                }
                // A message of a newer protocol, or a second record: not a heartbeat.
                Ok(Ok(Some(_))) => {}
                Ok(Ok(None)) => return "the worker ended its stream",
                Ok(Err(_)) => return "the stream broke",
            }
        }
    }
}
