//! What this worker shows on the data plane: the identity that it has on its gRPC port.

use baton_kv_transfer::Credentials;
use baton_node::identity::{Identity, Proof, Protocol, Role, Roles};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use std::sync::Arc;

/// Credentials of `identity`, where there is one.
pub(crate) fn of(identity: &Identity) -> Option<Arc<dyn Credentials>> {
    identity.proof().map(|proof| Arc::new(OfWorker(proof.clone())) as Arc<dyn Credentials>)
}

struct OfWorker(Proof);

impl Credentials for OfWorker {
    fn server(&self) -> Arc<ServerConfig> {
        self.0.server(Protocol::DataPlane)
    }

    fn client(&self) -> Arc<ClientConfig> {
        self.0.client(Protocol::DataPlane)
    }

    fn worker_name(&self) -> ServerName<'static> {
        Role::Worker.server_name()
    }

    fn is_worker(&self, chain: &[CertificateDer<'_>]) -> bool {
        Roles::of(chain).has(Role::Worker)
    }
}
