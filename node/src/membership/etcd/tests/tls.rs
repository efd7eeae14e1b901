//! An etcd that requires client certificates.

use super::support::MEMBERS_MAX;
use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker};
use crate::membership::{RouterMembership as _, WorkerMembership as _};
use crate::testing::certificates::certificates;
use crate::testing::etcd::EtcdServer;
use std::time::Duration;
use tokio::time::{sleep, timeout};

#[tokio::test]
async fn both_sides_show_certificates() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path()).unwrap();
    let file = |name: &str| folder.path().join(name);
    let flag = |flag: &str, name: &str| format!("--{flag}={}", file(name).display());
    let flags = [flag("cert-file", "node.pem"), flag("key-file", "node.key"), flag("trusted-ca-file", "ca.pem")];
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(["--client-cert-auth"]).collect();
    let server = EtcdServer::start_with(&flags).unwrap();
    let unknown = EtcdConfig { ca: Some(file("ca.pem")), ..server.config() };
    let known = EtcdConfig { cert: Some(file("node.pem")), key: Some(file("node.key")), ..unknown.clone() };

    let router = EtcdRouter::start(&known, 16);
    let stranger = EtcdWorker::new(&unknown, MEMBERS_MAX).register(record("d-1", 2));
    let _worker = EtcdWorker::new(&known, MEMBERS_MAX).register(record("d-0", 1));
    let mut view = router.view();
    let joined = timeout(Duration::from_secs(60), view.wait_for(|v| v.get(&record("d-0", 1).party).is_some()));
    joined.await.unwrap().unwrap();
    sleep(Duration::from_secs(1)).await;
    assert!(router.view().borrow().get(&record("d-1", 2).party).is_none(), "it showed no certificate");
    drop(stranger);
}
