//! Why a session with etcd ended.

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
    File {
        /// Which.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A live etcd says that the lease is over.
    #[error("the lease is gone, as etcd says")]
    LeaseGone,
    /// The watch was ended by etcd, or stands on another history than the view.
    #[error("the watch ended: {0}")]
    WatchEnded(String),
}

impl EtcdError {
    /// Whether the next session may start at once: etcd answers.
    pub(super) fn is_answered(&self) -> bool {
        matches!(self, Self::LeaseGone | Self::WatchEnded(_))
    }
}
