//! The configured membership backend of a process.

use super::embedded::{EmbeddedRouter, EmbeddedWorker, JoinConfig, JoinService, LeaseConfig};
use super::etcd::{EtcdRouter, EtcdWorker, OfflineSources};
use super::{RouterMembership, StoreState, WorkerMembership};
use crate::identity::Identity;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Where workers register: the values of `membership.backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// Routers keep the leases.
    #[default]
    Embedded,
    /// etcd keeps the leases.
    Etcd,
}

/// The backend of a router.
#[derive(Clone, Debug)]
pub enum RouterBackend {
    Embedded(EmbeddedRouter),
    Etcd(EtcdRouter),
}

impl RouterBackend {
    /// Starts the configured backend for the router with this identity; must be called within a tokio runtime.
    pub fn start(config: &LeaseConfig, identity: &Identity) -> Self {
        match config.backend {
            Backend::Embedded => Self::Embedded(EmbeddedRouter::new(config)),
            Backend::Etcd => {
                let offline = OfflineSources { cache_dir: config.cache_dir.clone(), seeds: config.seeds.clone() };
                Self::Etcd(EtcdRouter::start_as(&config.etcd, config.members_max, identity, offline))
            }
        }
    }

    /// The backend as the trait that routers use.
    pub fn membership(&self) -> Arc<dyn RouterMembership> {
        match self {
            Self::Embedded(router) => Arc::new(router.clone()),
            Self::Etcd(router) => Arc::new(router.clone()),
        }
    }

    /// The gRPC service where workers register, if there is one.
    pub fn service(&self) -> Option<JoinService> {
        match self {
            Self::Embedded(router) => Some(router.service()),
            Self::Etcd(_) => None,
        }
    }

    /// Suspected members: they stay in the view although their record is gone, and are asked directly.
    pub fn doubted(&self) -> usize {
        match self {
            Self::Embedded(_) => 0,
            Self::Etcd(router) => router.doubted(),
        }
    }

    /// Members that the store has not confirmed, if it has not answered since this router started; `None` once it has.
    pub fn unconfirmed(&self) -> Option<usize> {
        match self {
            Self::Embedded(_) => None,
            Self::Etcd(router) => router.unconfirmed(),
        }
    }

    /// Whether the view is up to date with its store; `None` if the router keeps it itself.
    pub fn store(&self) -> Option<StoreState> {
        match self {
            Self::Embedded(_) => None,
            Self::Etcd(router) => Some(router.store()),
        }
    }

    /// The reported state of the etcd nodes; `None` if the router keeps the membership itself.
    pub fn etcd_nodes(&self) -> Option<super::etcd::Nodes> {
        match self {
            Self::Embedded(_) => None,
            Self::Etcd(router) => Some(router.nodes()),
        }
    }

    /// Ends this router's participation. Workers keep their readiness.
    pub fn close(&self) {
        match self {
            Self::Embedded(router) => router.close(),
            Self::Etcd(router) => router.close(),
        }
    }

    /// Returns once a closed router has cached the records that it knew.
    pub async fn remembered(&self) {
        match self {
            Self::Embedded(_) => {}
            Self::Etcd(router) => router.remembered().await,
        }
    }
}

/// The configured backend of the worker with this identity.
pub fn worker(config: &JoinConfig, identity: &Identity) -> Box<dyn WorkerMembership> {
    match config.backend {
        Backend::Embedded => Box::new(EmbeddedWorker::new(config, identity)),
        Backend::Etcd => Box::new(EtcdWorker::new(&config.etcd, config.members_max)),
    }
}
