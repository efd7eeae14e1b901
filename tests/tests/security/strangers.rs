//! Strangers at the ports of a cluster: without a certificate, with one of another authority, and with one of ours for another role. What
//! they try was done to clusters that asked nobody who he is, and worked.

use anyhow::{Context, ensure};
use baton_node::grpc::{Channel, ChannelConfig, channel};
use baton_node::identity::{Authority, Identity, IdentityConfig, Protocol, Role};
use baton_proto::v1;
use baton_proto::v1::admin_client::AdminClient;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::membership_client::MembershipClient;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::telemetry_client::TelemetryClient;
use baton_proto::v1::worker_client::WorkerClient;
use baton_tests::http::Api;
use baton_tests::processes::{Up, baton_with, listening};
use baton_tests::service::Service;
use serde_json::json;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::{Code, Status};

const MODEL: &str = "--model=random:vocab=300,context=1024";
/// Longest wait for an answer that a stranger must not get.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Longest wait for words on the data plane.
const WORDS_MAX: Duration = Duration::from_secs(2);

async fn identity(dir: &Path, role: Role) -> anyhow::Result<Identity> {
    let config = IdentityConfig { dir: Some(dir.join(role.name())), ..IdentityConfig::default() };
    Ok(Identity::start(&config, role).await?)
}

/// A stranger who has read everything that there is to read of Baton: an authority of his own.
async fn foreign(home: &TempDir) -> anyhow::Result<[Identity; 3]> {
    let authority = Authority::new()?;
    for role in Role::ALL {
        authority.issue(&home.path().join(role.name()), &[role], &[], Duration::from_secs(86_400), "")?;
    }
    let of = async |role| identity(home.path(), role).await;
    Ok([of(Role::Router).await?, of(Role::Worker).await?, of(Role::Operator).await?])
}

fn to(address: SocketAddr, identity: &Identity, demanded: Role) -> anyhow::Result<Channel> {
    let config = ChannelConfig { connect_ms_max: 5_000, ..ChannelConfig::default() };
    Ok(channel(&address.to_string(), &config, identity, demanded)?)
}

/// What becomes of a call that must not be answered: its code.
async fn refusal<T>(what: &str, call: impl Future<Output = Result<T, Status>>) -> anyhow::Result<Code> {
    let Ok(answer) = timeout(ANSWER_MAX, call).await else { return Ok(Code::DeadlineExceeded) };
    let status = answer.err().with_context(|| format!("{what}: it was let in"))?;
    ensure!(!status.message().contains("decode-0") && !status.message().contains("prefill-0"), "{what}: {status}");
    Ok(status.code())
}

/// All that workers serve, asked as `who`.
async fn ask_worker(at: SocketAddr, who: &str, identity: &Identity) -> anyhow::Result<Vec<(String, Code)>> {
    let channel = to(at, identity, Role::Worker)?;
    let mut worker = WorkerClient::new(channel.clone());
    let named = |what: &str| format!("{what} at {at} {who}");
    let mut codes = Vec::new();
    let watch = v1::WatchRequest { router: "just looking".into(), cache_events: true, adapters: true };
    codes.push(("Watch".into(), refusal(&named("Watch"), worker.watch(watch)).await?));
    codes.push(("Bundle".into(), refusal(&named("Bundle"), worker.bundle(v1::BundleRequest::default())).await?));
    codes.push(("Record".into(), refusal(&named("Record"), worker.record(v1::RecordRequest::default())).await?));
    codes.push(("Drain".into(), refusal(&named("Drain"), worker.drain(v1::DrainRequest::default())).await?));
    let (mut prefill, mut decode) = (PrefillClient::new(channel.clone()), DecodeClient::new(channel.clone()));
    codes.push(("Run".into(), refusal(&named("Run"), prefill.run(v1::PrefillRequest::default())).await?));
    codes.push(("Generate".into(), refusal(&named("Generate"), decode.generate(v1::DecodeRequest::default())).await?));
    let mut telemetry = TelemetryClient::new(channel);
    codes.push(("Spans".into(), refusal(&named("Spans"), telemetry.spans(v1::SpansRequest::default())).await?));
    Ok(codes)
}

/// A greeting as the data plane's messages are framed, for a start that nobody is.
fn greeting() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let party = |name: &str, start: u64| [text(name), start.to_le_bytes().to_vec()].concat();
    let mut body = vec![0x42, 0x4b, 1, 1];
    body.extend([1_u32.to_le_bytes(), 2_u32.to_le_bytes()].concat());
    body.extend([0; 16]);
    body.extend([party("evil", 1), party("nobody", 0), vec![0; 32], vec![0; 64]].concat());
    let head = [&0xb07a_u16.to_le_bytes()[..], &1_u16.to_le_bytes(), &(body.len() as u32).to_le_bytes(), &[0; 16]];
    [head.concat(), body].concat()
}

/// What a socket says to a greeting.
async fn words(mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin) -> Vec<u8> {
    let mut said = Vec::new();
    if stream.write_all(&greeting()).await.is_ok() {
        let _ = timeout(WORDS_MAX, stream.read_to_end(&mut said)).await;
    }
    said
}

/// Greets whatever listens at `at` as a worker would: in clear, and under TLS as `identity`. Nothing that is said may be a word of the data
/// plane, or name the worker.
async fn greet(at: SocketAddr, who: &str, identity: &Identity) -> anyhow::Result<()> {
    let stream = TcpStream::connect(at).await?;
    let said = match identity.client(Protocol::DataPlane) {
        None => words(stream).await,
        Some(tls) => match TlsConnector::from(tls).connect(Role::Worker.server_name(), stream).await {
            Ok(stream) => words(stream).await,
            Err(_) => Vec::new(),
        },
    };
    let text = String::from_utf8_lossy(&said);
    let frames = said.windows(2).filter(|pair| *pair == [0x42, 0x4b]).count();
    ensure!(!text.contains("-0") && frames == 0, "{at} answers a stranger {who}: {text:?}");
    Ok(())
}

/// A running `baton up` and what its user finds.
struct Target {
    up: Up,
    cluster: SocketAddr,
    folder: PathBuf,
    workers: Vec<(&'static str, Vec<SocketAddr>)>,
}

impl Target {
    fn start(state: &TempDir) -> anyhow::Result<Self> {
        let state = state.path().to_str().context("a path of text")?;
        let up = Up::start_with(&[MODEL], &[("XDG_STATE_HOME", state)])?;
        let (cluster, operator) = up.cluster()?;
        let folder = operator.parent().context("a folder")?.to_path_buf();
        let mut workers = Vec::new();
        for name in ["prefill-0", "decode-0"] {
            let metrics = up.metrics(name)?;
            let mut at = listening(up.child(&format!("--instance={name}"))?)?;
            at.retain(|address| !metrics.contains(&format!("{address}/")));
            ensure!(!at.is_empty(), "{name} listens nowhere");
            workers.push((name, at));
        }
        Ok(Self { up, cluster, folder, workers })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_refused_at_every_port_of_a_cluster_that_baton_up_started() -> anyhow::Result<()> {
    let (state, home) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let target = Target::start(&state)?;
    let [router, worker, operator] = foreign(&home).await?;
    let nobody = Identity::default();
    for (name, ports) in &target.workers {
        for at in ports {
            for (who, identity) in [("without a certificate", &nobody), ("with another authority's", &router)] {
                for (what, code) in ask_worker(*at, who, identity).await? {
                    // The connection fails, before any service hears of the call.
                    let silence =
                        [Code::Unavailable, Code::Unknown, Code::Internal, Code::Cancelled, Code::DeadlineExceeded];
                    ensure!(silence.contains(&code), "{name} {who}: {what} ended with {code:?}");
                }
            }
            greet(*at, "without a certificate", &nobody).await?;
            greet(*at, "with another authority's", &worker).await?;
        }
    }
    let record = || one(v1::JoinRequest::default());
    for (who, as_worker, as_operator) in
        [("without a certificate", &nobody, &nobody), ("with another authority's", &worker, &operator)]
    {
        let join = MembershipClient::new(to(target.cluster, as_worker, Role::Router)?).join(record()).await;
        refusal(&format!("Join {who}"), async { join.map(drop) }).await?;
        ask_admin(target.cluster, who, as_operator).await?;
    }
    // Past the cluster port, where clients call.
    let clients: SocketAddr = target.up.grpc()?.parse()?;
    let codes = ask_admin(clients, "among clients", &nobody).await?;
    ensure!(codes.iter().all(|code| *code == Code::Unauthenticated), "{codes:?}");
    let join = MembershipClient::new(to(clients, &nobody, Role::Router)?).join(record()).await;
    let code = refusal("Join among clients", async { join.map(drop) }).await?;
    ensure!(code == Code::Unimplemented, "{code:?}");

    // It serves on.
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let answer = Api::new(target.up.openai()?).post("completions", body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    target.up.stop()
}

async fn ask_admin(at: SocketAddr, who: &str, identity: &Identity) -> anyhow::Result<Vec<Code>> {
    let mut admin = AdminClient::new(to(at, identity, Role::Router)?);
    let drain = v1::DrainWorkerRequest { worker: "decode-0".into(), timeout_ms: Some(0) };
    let named = |what: &str| format!("{what} at {at} {who}");
    Ok(vec![
        refusal(&named("Status"), admin.status(v1::StatusRequest {})).await?,
        refusal(&named("Drain"), admin.drain(drain)).await?,
        refusal(&named("Trace"), AdminClient::new(to(at, identity, Role::Router)?).trace(v1::TraceRequest::default()))
            .await?,
    ])
}

fn one(request: v1::JoinRequest) -> impl futures::Stream<Item = v1::JoinRequest> {
    futures::stream::iter([request])
}

/// One certificate is not as good as another: a worker whose key was stolen reads no names of others' prefixes, and drains nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_for_its_role_alone() -> anyhow::Result<()> {
    let state = tempfile::tempdir()?;
    let target = Target::start(&state)?;
    let [router, worker, operator] = [
        identity(&target.folder, Role::Router).await?,
        identity(&target.folder, Role::Worker).await?,
        identity(&target.folder, Role::Operator).await?,
    ];
    let mut asked = 0;
    for (name, ports) in &target.workers {
        for at in ports {
            let watch = |identity: &Identity| {
                let channel = to(*at, identity, Role::Worker);
                async move {
                    WorkerClient::new(channel?).watch(v1::WatchRequest::default()).await.map_err(anyhow::Error::from)
                }
            };
            // Of what listens there, this is gRPC: a router hears of its load.
            let Ok(reports) = watch(&router).await else { continue };
            let report = timeout(ANSWER_MAX, reports.into_inner().message()).await??.context("a report")?;
            ensure!(report.party.is_some_and(|party| party.instance == *name));
            asked += 1;
            for (what, code) in ask_worker(*at, "with a worker's", &worker).await? {
                ensure!(code == Code::PermissionDenied, "{name}: {what} ended with {code:?}");
            }
            let channel = to(*at, &operator, Role::Worker)?;
            let watch = WorkerClient::new(channel.clone()).watch(v1::WatchRequest::default()).await;
            ensure!(watch.is_err_and(|status| status.code() == Code::PermissionDenied), "an operator reads names");
            // The drain of a start that is none.
            let drain = WorkerClient::new(channel).drain(v1::DrainRequest::default()).await;
            ensure!(drain.is_err_and(|status| status.code() == Code::FailedPrecondition), "an operator may drain");
            // A router is no worker: nobody hands KV to it.
            greet(*at, "with a router's", &router).await?;
        }
    }
    ensure!(asked == 2, "gRPC was found on {asked} workers");
    let codes = ask_admin(target.cluster, "with a worker's", &worker).await?;
    ensure!(codes.iter().all(|code| *code == Code::PermissionDenied), "{codes:?}");
    let join =
        MembershipClient::new(to(target.cluster, &operator, Role::Router)?).join(one(v1::JoinRequest::default())).await;
    let code = refusal("Join with an operator's", async { join.map(drop) }).await?;
    ensure!(code == Code::PermissionDenied, "{code:?}");
    AdminClient::new(to(target.cluster, &operator, Role::Router)?).status(v1::StatusRequest {}).await?;

    // Whoever started it needs no flag: the verbs find their certificate.
    let server = format!("http://{}", target.up.grpc()?);
    let state = state.path().to_str().context("a path of text")?;
    let verb = |arguments: &[&str], state: &str| baton_with(arguments, &[("XDG_STATE_HOME", state)]);
    let status = verb(&["status", "--once", "--server", &server], state)?;
    ensure!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let elsewhere = tempfile::tempdir()?;
    let other = elsewhere.path().to_str().context("a path of text")?;
    let refused = verb(&["drain", "decode-0", "--server", &server], other)?;
    let why = String::from_utf8(refused.stderr)?;
    ensure!(!refused.status.success() && why.contains("--identity"), "{why}");
    let folder = target.folder.join("operator");
    let (folder, cluster) = (folder.to_str().context("a path of text")?, target.cluster.to_string());
    let drained = verb(&["drain", "decode-0", "--server", &cluster, "--identity", folder], other)?;
    let told = String::from_utf8(drained.stdout)?;
    ensure!(drained.status.success() && told.contains("decode-0 is drained"), "{told}");
    let children = target.up.children()?;
    target.up.stop()?;
    ensure!(!Path::new(folder).exists(), "the authority outlives {children:?}");
    Ok(())
}

/// The hazard: a process that has no identity asks nobody for one. So it listens on loopback alone, unless it is told that it may.
#[tokio::test(flavor = "multi_thread")]
async fn without_an_identity_anybody_is_a_router_and_nobody_listens_off_loopback() -> anyhow::Result<()> {
    let flags = |flags: &[&str]| flags.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>();
    let open = flags(&[MODEL, "--admin-listen=127.0.0.1:0", "--threads=1", "--log=error"]);
    let mut worker = Service::start("baton-decode-worker", &open)?;
    let (grpc, _) = worker.listening().await?;
    let mut client = WorkerClient::new(to(grpc, &Identity::default(), Role::Worker)?);
    let watch = v1::WatchRequest { router: "just looking".into(), cache_events: true, adapters: true };
    // It listens before its model is loaded.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while client.watch(watch.clone()).await.is_err() {
        ensure!(tokio::time::Instant::now() < deadline, "nobody answers");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    worker.terminate().await?;

    for (program, listen) in
        [("baton-decode-worker", "--grpc-listen=0.0.0.0:0"), ("baton-router", "--cluster-listen=0.0.0.0:0")]
    {
        let advertised = if program == "baton-router" { "BATON_CLUSTER__ADVERTISE" } else { "BATON_GRPC__ADVERTISE" };
        let run = |more: &[&str]| {
            let mut command = std::process::Command::new(baton_tests::processes::binary(program)?);
            command.args([listen, "--dump-config"]).args(more).env(advertised, "here:1");
            anyhow::Ok(command.output()?)
        };
        let refused = run(&[])?;
        let why = String::from_utf8(refused.stderr)?;
        ensure!(!refused.status.success(), "{program} starts");
        for part in ["identity.dir", "is 0.0.0.0", "baton identity", "--insecure"] {
            ensure!(why.contains(part), "{part:?} is not in {why}");
        }
        for told in [&["--insecure"][..], &["--identity=/somewhere"]] {
            let allowed = run(told)?;
            ensure!(allowed.status.success(), "{program} {told:?}: {}", String::from_utf8_lossy(&allowed.stderr));
        }
    }
    Ok(())
}
