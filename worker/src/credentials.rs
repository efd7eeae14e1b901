//! This worker's credentials on the data plane: the same identity as on its gRPC port.

use baton_kv_transfer::Credentials;
use baton_node::identity::{Identity, Proof, Protocol, Role, Roles};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use std::sync::Arc;

/// Credentials of `identity`, if there is one.
pub fn of(identity: &Identity) -> Option<Arc<dyn Credentials>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::identity::{Authority, IdentityConfig};
    use rustls::pki_types::pem::PemObject as _;
    use std::time::{Duration, Instant};
    use tempfile::TempDir;

    const LASTS: Duration = Duration::from_secs(86_400);

    /// A worker's identity files, which are read again periodically.
    async fn worker(authority: &Authority) -> (TempDir, Arc<dyn Credentials>) {
        let folder = tempfile::tempdir().unwrap();
        authority.issue(folder.path(), &[Role::Worker], &[], LASTS, "").unwrap();
        let config = IdentityConfig { dir: Some(folder.path().into()), reread_ms: 10, insecure: false };
        (folder, of(&Identity::start(&config, Role::Worker).await.unwrap()).unwrap())
    }

    #[tokio::test]
    async fn only_workers_move_kv() {
        let authority = Authority::new().unwrap();
        let (_folder, credentials) = worker(&authority).await;
        let is_worker = |roles: &[Role]| {
            let folder = tempfile::tempdir().unwrap();
            authority.issue(folder.path(), roles, &["127.0.0.1".into()], LASTS, "").unwrap();
            let chain = CertificateDer::pem_file_iter(folder.path().join("tls.crt")).unwrap();
            credentials.is_worker(&chain.collect::<Result<Vec<_>, _>>().unwrap())
        };
        assert!(is_worker(&[Role::Worker]) && is_worker(&[Role::Router, Role::Worker]));
        for others in [&[Role::Router][..], &[Role::Operator], &[Role::Router, Role::Operator], &[]] {
            assert!(!is_worker(others), "{others:?}");
        }
    }

    #[tokio::test]
    async fn connections_are_made_with_the_files_as_they_are_now() {
        let authority = Authority::new().unwrap();
        let (folder, credentials) = worker(&authority).await;
        let (server, client) = (credentials.server(), credentials.client());
        authority.issue(folder.path(), &[Role::Worker], &[], LASTS, "").unwrap();
        let by = Instant::now() + Duration::from_secs(20);
        while Arc::ptr_eq(&server, &credentials.server()) || Arc::ptr_eq(&client, &credentials.client()) {
            assert!(Instant::now() < by, "the data plane keeps the old certificate");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
