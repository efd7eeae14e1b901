//! Processes that authenticate to each other, and strangers that cannot.

use super::*;
use crate::grpc::{self, ChannelConfig, GrpcConfig, channel};
use crate::listen::{Callers, HELLO_MAX, Listener};
use baton_proto::v1::{WatchRequest, admin_client::AdminClient, worker_client::WorkerClient};
use std::net::SocketAddr;
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Many times the interval at which files are read.
const READ_AGAIN: Duration = Duration::from_secs(2);
const MAX: Duration = Duration::from_secs(20);

/// A folder in which an authority has signed a certificate for each role.
struct Cluster {
    folder: tempfile::TempDir,
    authority: Authority,
}

impl Cluster {
    fn new() -> Self {
        let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new().unwrap());
        let cluster = Self { folder, authority };
        Role::ALL.into_iter().for_each(|role| cluster.issue(role, &[role], ""));
        cluster
    }

    fn issue(&self, place: Role, roles: &[Role], also: &str) {
        self.authority.issue(&self.dir(place), roles, &[], 30 * DAY, also).unwrap();
    }

    fn dir(&self, role: Role) -> std::path::PathBuf {
        self.folder.path().join(role.name())
    }

    fn config(&self, place: Role) -> IdentityConfig {
        IdentityConfig { dir: Some(self.dir(place)), reread_ms: 10, insecure: false }
    }

    async fn identity(&self, role: Role) -> Identity {
        Identity::start(&self.config(role), role).await.unwrap()
    }
}

/// A server with health only.
async fn serve(identity: &Identity) -> (SocketAddr, DropGuard) {
    serve_as(identity, GrpcConfig::default()).await
}

async fn serve_as(identity: &Identity, config: GrpcConfig) -> (SocketAddr, DropGuard) {
    let stop = CancellationToken::new();
    let listener = grpc::bind(&config).await.unwrap();
    let address = listener.address();
    let router = grpc::with_reflection(grpc::server(&config).add_service(grpc::health().1), &[]);
    tokio::spawn(grpc::serve(router, listener, Callers::Peers(identity.clone()), stop.clone()));
    (address, stop.drop_guard())
}

async fn check(address: SocketAddr, identity: &Identity, demanded: Role) -> Result<(), tonic::Status> {
    let channel = channel(&address.to_string(), &ChannelConfig::default(), identity, demanded).unwrap();
    HealthClient::new(channel).check(HealthCheckRequest::default()).await.map(drop)
}

#[tokio::test]
async fn each_side_demands_what_the_other_is() {
    let (ours, theirs) = (Cluster::new(), Cluster::new());
    let (worker, router) = (ours.identity(Role::Worker).await, ours.identity(Role::Router).await);
    let (address, _server) = serve(&worker).await;
    check(address, &router, Role::Worker).await.unwrap();

    let impostor = check(address, &router, Role::Router).await.unwrap_err();
    assert!(impostor.message().contains("not valid for name"), "{impostor}");
    let stranger = check(address, &theirs.identity(Role::Router).await, Role::Worker).await.unwrap_err();
    assert!(stranger.message().contains("invalid peer certificate"), "{stranger}");
    let plain = check(address, &Identity::default(), Role::Worker).await.unwrap_err();
    assert!(matches!(plain.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled), "{plain:?}");
    // The reverse: the server presents a certificate of another authority.
    let (foreign, _server) = serve(&theirs.identity(Role::Worker).await).await;
    let refused = check(foreign, &router, Role::Worker).await.unwrap_err();
    assert!(refused.message().contains("invalid peer certificate"), "{refused}");
}

#[tokio::test]
async fn who_proves_nothing_takes_no_place_of_who_does() {
    let cluster = Cluster::new();
    let config = GrpcConfig { connections_max: 40, ..GrpcConfig::default() };
    let (address, _server) = serve_as(&cluster.identity(Role::Worker).await, config).await;
    let router = cluster.identity(Role::Router).await;
    let mut silent = Vec::new();
    for _ in 0..3 {
        for _ in 0..60 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        // Well before the time limit of any of them.
        tokio::time::timeout(HELLO_MAX / 2, check(address, &router, Role::Worker)).await.expect("kept out").unwrap();
    }
}

#[tokio::test]
async fn a_call_is_for_the_roles_that_stand_in_the_table() {
    let cluster = Cluster::new();
    let (address, _server) = serve(&cluster.identity(Role::Worker).await).await;
    let as_role = async |role: Role| {
        let identity = cluster.identity(role).await;
        channel(&address.to_string(), &ChannelConfig::default(), &identity, Role::Worker).unwrap()
    };
    // Not served there: a caller that passes the rules gets that error.
    let watch = async |role| WorkerClient::new(as_role(role).await).watch(WatchRequest::default()).await.unwrap_err();
    assert_eq!(watch(Role::Router).await.code(), Code::Unimplemented);
    let refused = watch(Role::Worker).await;
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("is for the role router; your certificate is that of worker"), "{refused}");
    let status = async |role| {
        let request = baton_proto::v1::StatusRequest::default();
        AdminClient::new(as_role(role).await).status(request).await.unwrap_err().code()
    };
    assert_eq!(status(Role::Operator).await, Code::Unimplemented);
    assert_eq!(status(Role::Worker).await, Code::PermissionDenied);

    // A certificate of this authority for another purpose, such as etcd.
    let dir = cluster.folder.path().join("etcd");
    cluster.authority.issue(&dir, &[], &["etcd.example".into()], DAY, "").unwrap();
    let error = Identity::start(&IdentityConfig { dir: Some(dir), ..IdentityConfig::default() }, Role::Router).await;
    assert!(matches!(error, Err(IdentityError::Role { .. })), "{error:?}");
    let nobody = may_call(&Roles::default(), "/baton.v1.Worker/Watch").unwrap_err();
    assert_eq!(nobody.code(), Code::Unauthenticated);
}

#[test]
fn every_rpc_of_a_cluster_has_its_roles() {
    use prost::Message as _;
    let set = prost_types::FileDescriptorSet::decode(baton_proto::DESCRIPTORS).unwrap();
    let of_clients = |path: &str| {
        ["/baton.v1.Inference/", "/inference.GRPCInferenceService/"].iter().any(|service| path.starts_with(service))
    };
    let mut seen = 0;
    for (file, service) in set.file.iter().flat_map(|file| file.service.iter().map(move |service| (file, service))) {
        for method in &service.method {
            let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
            let allowed = rules::allowed(&path);
            // Clients have no certificates.
            assert_eq!(allowed.is_empty(), of_clients(&path), "{path} is for {allowed:?}");
            seen += 1;
        }
    }
    assert!(seen >= 10, "{seen} methods");
}

#[tokio::test]
async fn files_are_taken_as_they_change_and_wrong_ones_change_nothing() {
    let (mut cluster, stranger) = (Cluster::new(), Cluster::new());
    let (worker, router) = (cluster.identity(Role::Worker).await, cluster.identity(Role::Router).await);
    let (address, _server) = serve(&worker).await;
    let kept = channel(&address.to_string(), &ChannelConfig::default(), &router, Role::Worker).unwrap();
    let mut kept = HealthClient::new(kept);
    kept.check(HealthCheckRequest::default()).await.unwrap();

    // The key of another certificate.
    let (key, own) = (cluster.dir(Role::Worker).join(KEY_FILE), cluster.dir(Role::Worker));
    std::fs::copy(stranger.dir(Role::Worker).join(KEY_FILE), &key).unwrap();
    sleep(READ_AGAIN).await;
    check(address, &router, Role::Worker).await.unwrap();

    // Another authority: both are trusted, then the new one signs, then only the new one is trusted.
    let next = Authority::new().unwrap();
    let old = cluster.authority.pem().to_owned();
    let both = [Role::Worker, Role::Router];
    for role in both {
        cluster.issue(role, &[role], next.pem());
    }
    sleep(READ_AGAIN).await;
    check(address, &router, Role::Worker).await.unwrap();
    cluster.authority = next;
    for role in both {
        cluster.issue(role, &[role], &old);
        check(address, &router, Role::Worker).await.unwrap();
        sleep(READ_AGAIN).await;
        check(address, &router, Role::Worker).await.unwrap();
    }
    for role in both {
        cluster.issue(role, &[role], "");
    }
    sleep(READ_AGAIN).await;
    check(address, &router, Role::Worker).await.unwrap();
    kept.check(HealthCheckRequest::default()).await.expect("old connections stay");

    // A peer with a certificate of the old authority is now refused.
    let former = tempfile::tempdir().unwrap();
    stranger.authority.issue(former.path(), &[Role::Router], &[], DAY, cluster.authority.pem()).unwrap();
    let config = IdentityConfig { dir: Some(former.path().into()), ..IdentityConfig::default() };
    let former = Identity::start(&config, Role::Router).await.unwrap();
    assert!(check(address, &former, Role::Worker).await.is_err());
    std::fs::remove_dir_all(own).unwrap();
    sleep(READ_AGAIN).await;
    check(address, &router, Role::Worker).await.unwrap();
}

#[tokio::test]
async fn who_does_not_finish_a_handshake_is_let_go() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let cluster = Cluster::new();
    let short = Duration::from_millis(400);
    let mut listener = Listener::bind("127.0.0.1:0".parse().unwrap(), 10).await.unwrap();
    listener.hello_max = short;
    let address = listener.address();
    let router = grpc::server(&GrpcConfig::default()).add_service(grpc::health().1);
    let identity = cluster.identity(Role::Worker).await;
    tokio::spawn(grpc::serve(router, listener, Callers::Peers(identity), CancellationToken::new()));
    for words in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00"] {
        let mut silent = TcpStream::connect(address).await.unwrap();
        silent.write_all(words).await.unwrap();
        let began = std::time::Instant::now();
        let mut said = Vec::new();
        let end = tokio::time::timeout(MAX, silent.read_to_end(&mut said)).await.expect("held for ever");
        assert!(end.is_err() || said.is_empty(), "{said:?}");
        assert!(began.elapsed() >= short / 2, "{words:?} was cut off early");
    }
    // The same for a peer that has authenticated and sends nothing.
    let client = cluster.identity(Role::Router).await.client(Protocol::Grpc).unwrap();
    let stream = TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(client);
    let mut silent = connector.connect(Role::Worker.server_name(), stream).await.unwrap();
    let mut said = Vec::new();
    let _ = tokio::time::timeout(MAX, silent.read_to_end(&mut said)).await.expect("held for ever");
}

#[tokio::test]
async fn files_that_cannot_be_used_say_what_is_wrong() {
    let cluster = Cluster::new();
    let told = async |dir: std::path::PathBuf, role: Role| {
        let config = IdentityConfig { dir: Some(dir), ..IdentityConfig::default() };
        Identity::start(&config, role).await.unwrap_err().chain()
    };
    let nowhere = told(cluster.folder.path().join("nowhere"), Role::Worker).await;
    assert!(nowhere.contains("ca.crt, tls.crt and tls.key") && nowhere.contains("nowhere"), "{nowhere}");
    let wrong = told(cluster.dir(Role::Worker), Role::Router).await;
    assert!(wrong.contains("router.baton.internal") && wrong.contains("not valid for name"), "{wrong}");
    std::fs::write(cluster.dir(Role::Worker).join(CERTIFICATE_FILE), "nothing").unwrap();
    let empty = told(cluster.dir(Role::Worker), Role::Worker).await;
    assert!(empty.contains("tls.crt holds no certificate"), "{empty}");
    let old = cluster.folder.path().join("old");
    cluster.authority.issue(&old, &[Role::Worker], &[], Duration::ZERO, "").unwrap();
    sleep(Duration::from_millis(1_100)).await;
    let ended = told(old, Role::Worker).await;
    assert!(ended.contains("expired"), "{ended}");
}

#[test]
fn an_authority_is_found_again_and_only_its_owner_reads_keys() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (at, of_worker) = (folder.path().join("authority"), folder.path().join("worker"));
    Authority::new().unwrap().save(&at).unwrap();
    let authority = Authority::load(&at).unwrap();
    authority.issue(&of_worker, &[Role::Worker], &["127.0.0.1".into()], DAY, "").unwrap();
    let files = Files::read(FolderSetting::Identity, &of_worker).unwrap();
    Tls::of(&files, Role::Worker, SystemTime::now()).unwrap();
    for (path, mode) in [(&at, 0o700), (&at.join("ca.key"), 0o600), (&of_worker.join(KEY_FILE), 0o600)] {
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, mode, "{}", path.display());
    }
}

#[test]
fn whoever_can_be_reached_has_an_identity_or_says_that_none_is_needed() {
    use crate::config::Checker;
    let problems = |config: &IdentityConfig, address: &str| {
        let mut checker = Checker::default();
        let listens = [("transfer.bind", [127, 0, 0, 1].into()), ("grpc.listen", address.parse().unwrap())];
        config.check_listeners(&listens, &mut checker);
        checker.into_problems()
    };
    let none = IdentityConfig::default();
    assert_eq!(problems(&none, "127.0.0.9"), []);
    let told = problems(&none, "0.0.0.0");
    assert!(told.len() == 1 && told[0].0 == "identity.dir", "{told:?}");
    for part in ["grpc.listen is 0.0.0.0", "baton identity", "--insecure"] {
        assert!(told[0].1.contains(part), "{part:?} is not in {told:?}");
    }
    assert_eq!(problems(&IdentityConfig { insecure: true, ..none.clone() }, "10.0.0.1"), []);
    assert_eq!(problems(&IdentityConfig { dir: Some("/identity".into()), ..none }, "::"), []);
}
