//! Why a session with etcd ended.

use crate::backoff::Backoff;
use std::time::Duration;

/// No error ends a registration or a view by itself: the next session finds out the actual state.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    /// No answer in time.
    #[error("etcd does not answer ({0})")]
    Silent(&'static str),
    /// An error of the network or of etcd.
    #[error("etcd fails: {0}")]
    Failed(#[from] etcd_client::Error),
    /// A configured file cannot be read.
    #[error("cannot read {path}: {source}; it is named in membership.etcd")]
    File { path: std::path::PathBuf, source: std::io::Error },
    /// A live etcd reports that the lease has ended.
    #[error("etcd reports that the lease is gone")]
    LeaseGone,
    /// The nodes belong to several clusters, and this node's is not the chosen one.
    #[error("{0}")]
    Divided(String),
    /// etcd ended the watch, or its history differs from that of the view.
    #[error("the watch ended: {0}")]
    WatchEnded(String),
}

impl EtcdError {
    /// Whether a live etcd refused the call, for lack of space or of a permission; another session would not change
    /// that.
    pub(super) fn is_refusal(&self) -> bool {
        let Self::Failed(etcd_client::Error::GRpcStatus(status)) = self else { return false };
        matches!(status.code(), tonic::Code::ResourceExhausted | tonic::Code::PermissionDenied)
    }

    /// Handles the end of a session: logs the error once, and returns the wait before the next session. `worked`: the
    /// session had worked.
    pub(super) fn wait(&self, backoff: &mut Backoff<String>, worked: bool) -> Duration {
        if worked {
            backoff.reset();
        }
        let problem = self.to_string();
        if backoff.is_news(problem.clone()) {
            tracing::warn!(problem, "begins a new session with etcd");
        }
        // etcd answers, so the backoff does not grow for this failure.
        let is_answered = matches!(self, Self::LeaseGone | Self::WatchEnded(_));
        if worked && is_answered { backoff.jittered() } else { backoff.wait() }
    }
}
