//! Two workers of a role, either of which may be called.

use super::cluster::Cluster;
use super::fake::{DecodeCall, Fake, PrefillCall};
use baton_types::Role;

/// Two workers of each role.
pub(crate) struct Two {
    pub(crate) cluster: Cluster,
    pub(crate) p: [Fake; 2],
    pub(crate) d: [Fake; 2],
}

impl Two {
    pub(crate) async fn start(change: impl FnOnce(&mut crate::RouterConfig)) -> Self {
        let cluster = Cluster::start(change).await;
        let p = [cluster.worker(Role::Prefill, "p0").await, cluster.worker(Role::Prefill, "p1").await];
        let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
        Self { cluster, p, d }
    }

    /// The next claim, accepted, and the other decode worker.
    pub(crate) async fn claim(&self) -> (DecodeCall, &Fake) {
        let (call, _, other) = either(&self.d).await;
        call.claimed().await;
        (call, other)
    }

    /// The next prefill, and the other prefill worker.
    pub(crate) async fn prefill(&self) -> (PrefillCall, &Fake) {
        tokio::select! {
            call = self.p[0].prefill() => (call, &self.p[1]),
            call = self.p[1].prefill() => (call, &self.p[0]),
        }
    }
}

/// The next call of `Decode/Generate`, the worker that received it, and the other one.
pub(crate) async fn either(d: &[Fake; 2]) -> (DecodeCall, &Fake, &Fake) {
    tokio::select! {
        call = d[0].decode() => (call, &d[0], &d[1]),
        call = d[1].decode() => (call, &d[1], &d[0]),
    }
}
