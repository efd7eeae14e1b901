//! Why a session with etcd ended.

use crate::backoff::Backoff;
use std::time::Duration;

/// None of these ends a registration or a view by itself: the next session finds out what is true.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    /// No answer in time.
    #[error("etcd does not answer ({0})")]
    Silent(&'static str),
    /// An error, of the network or of etcd.
    #[error("etcd fails: {0}")]
    Failed(#[from] etcd_client::Error),
    /// A file that the configuration names.
    #[error("cannot read {path}: {source}; it is named in membership.etcd")]
    File { path: std::path::PathBuf, source: std::io::Error },
    /// A live etcd says that the lease is over.
    #[error("the lease is gone, as etcd says")]
    LeaseGone,
    /// The nodes are of several clusters, and this one's is not the one to hold with.
    #[error("{0}")]
    Divided(String),
    /// The watch was ended by etcd, or stands on another history than the view.
    #[error("the watch ended: {0}")]
    WatchEnded(String),
}

impl EtcdError {
    /// A live etcd does not do what was asked, for want of space or of a permission, which another session would not change.
    pub(super) fn is_refusal(&self) -> bool {
        let Self::Failed(etcd_client::Error::GRpcStatus(status)) = self else { return false };
        matches!(status.code(), tonic::Code::ResourceExhausted | tonic::Code::PermissionDenied)
    }

    /// A session that `worked` ended so: says it once, and how long to wait for the next.
    pub(super) fn wait(&self, backoff: &mut Backoff<String>, worked: bool) -> Duration {
        if worked {
            backoff.reset();
        }
        let problem = self.to_string();
        if backoff.is_news(problem.clone()) {
            tracing::warn!(problem, "begins a new session with etcd");
        }
        // Etcd answers: the wait after the next failure is no longer for this one.
        let is_answered = matches!(self, Self::LeaseGone | Self::WatchEnded(_));
        if worked && is_answered { backoff.jittered() } else { backoff.wait() }
    }
}
