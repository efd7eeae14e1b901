//! Certificates and their authority are replaced while a cluster serves: no request fails, and who is not renewed is a stranger in the end.

use anyhow::{Context, ensure};
use baton_node::grpc::{ChannelConfig, channel};
use baton_node::identity::{Authority, Identity, IdentityConfig, Role};
use baton_node::testing::etcd::EtcdServer;
use baton_proto::v1::{WatchRequest, worker_client::WorkerClient};
use baton_tests::eventually::eventually;
use baton_tests::load::{Case, Load};
use baton_tests::service::Service;
use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

const MODEL: &str = "--model=random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=1024,seed=11";
/// Some prefill where they decode, some elsewhere.
const CASES: [Case; 2] = [Case::new(400, 40, false), Case::new(20, 30, true)];
const LASTS: Duration = Duration::from_secs(86_400);
/// How long a cluster serves with each set of files.
const SERVES: Duration = Duration::from_secs(1);
/// What a process logs when it has taken other files.
const TAKEN: &str = "takes the folder's new files";
const CONFIG: &str = "[identity]\nreread_ms = 100\n";
/// What a server of etcd shows.
const SERVER: &str = "server";

/// Every process' files.
fn issue(home: &Path, authority: &Authority, also: &str) -> anyhow::Result<()> {
    for role in Role::ALL {
        authority.issue(&home.join(role.name()), &[role], &[], LASTS, also)?;
    }
    Ok(authority.issue(&home.join(SERVER), &[], &["127.0.0.1".into()], LASTS, also)?)
}

/// Waits until all processes have taken the files that are there now. Each is changed by a line that means nothing, twice: what a process
/// takes second was read after it had taken the first.
async fn all_take(home: &Path, workers: &[Service], router: &Service) -> anyhow::Result<()> {
    let taken = || workers.iter().chain([router]).map(|service| service.stderr().matches(TAKEN).count());
    for _ in 0..2 {
        let before: Vec<usize> = taken().collect();
        for role in [Role::Router, Role::Worker] {
            let mut file = File::options().append(true).open(home.join(role.name()).join("ca.crt"))?;
            file.write_all(b"\n")?;
        }
        eventually(async || {
            let waits = taken().zip(&before).filter(|(now, before)| now <= before).count();
            ensure!(waits == 0, "{waits} processes do not take other files");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

async fn rotate(
    membership: impl FnOnce(&Path) -> anyhow::Result<(Option<EtcdServer>, Vec<String>)>,
) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let home = folder.path();
    let (old, new) = (Authority::new()?, Authority::new()?);
    // etcd reads its certificate anew for each connection, and whom it trusts once.
    issue(home, &old, new.pem())?;
    let (etcd, membership) = membership(home)?;
    issue(home, &old, "")?;
    let config = home.join("config.toml");
    std::fs::write(&config, CONFIG)?;
    let common = |role: Role| {
        let own =
            [format!("--config={}", config.display()), format!("--identity={}", home.join(role.name()).display())];
        [&own[..], &["--log=warn,baton_node::identity=info".into()], &membership].concat()
    };
    let listens = ["--grpc-listen", "--http-listen", "--cluster-listen"].map(|flag| format!("{flag}=127.0.0.1:0"));
    let mut router = Service::start("baton-router", &[common(Role::Router), listens.to_vec()].concat())?;
    let (clients, cluster) = (router.listening().await?.0, router.cluster().await?);
    let worker = |role: &str, name: &str| {
        let own = [format!("--routers={cluster}"), format!("--instance={name}"), MODEL.into(), "--threads=1".into()];
        let listens = ["--grpc-listen=127.0.0.1:0".into(), "--admin-listen=127.0.0.1:0".into()];
        Service::start(&format!("baton-{role}-worker"), &[&common(Role::Worker)[..], &own, &listens].concat())
    };
    let mut workers = vec![worker("prefill", "p-0")?, worker("decode", "d-0")?];
    for service in workers.iter_mut().chain([&mut router]) {
        service.ready().await?;
    }
    let load = Load::start(&[format!("http://{clients}")], &CASES).await?;
    load.goes_on("before", SERVES).await?;

    issue(home, &old, "")?;
    all_take(home, &workers, &router).await?;
    load.goes_on("other certificates", SERVES).await?;
    issue(home, &old, new.pem())?;
    all_take(home, &workers, &router).await?;
    load.goes_on("both authorities are trusted", SERVES).await?;
    let former = PathBuf::from(home).join("former");
    old.issue(&former, &[Role::Router], &[], LASTS, new.pem())?;
    let at = workers[1].listening().await?.0;
    let former = IdentityConfig { dir: Some(former), ..IdentityConfig::default() };
    let former = Identity::start(&former, Role::Router).await?;
    watch(at, &former).await.context("a router that is not renewed yet")?;
    issue(home, &new, old.pem())?;
    all_take(home, &workers, &router).await?;
    load.goes_on("the new authority signs", SERVES).await?;
    issue(home, &new, "")?;
    all_take(home, &workers, &router).await?;
    load.goes_on("only the new authority is trusted", SERVES).await?;

    // Connections from before stay; new ones are made with the new files alone.
    let refused = watch(at, &former).await;
    ensure!(refused.is_err(), "the old authority is still trusted");
    workers.push(worker("decode", "d-1")?);
    workers[2].ready().await.context("one that came after")?;
    workers[1].terminate().await?;
    load.goes_on("one that came before is gone", SERVES).await?;
    let (answers, _) = load.stop().await?;
    ensure!(answers > 0);
    for service in [0, 2] {
        workers[service].terminate().await?;
    }
    router.terminate().await?;
    drop(etcd);
    Ok(())
}

async fn watch(at: SocketAddr, identity: &Identity) -> anyhow::Result<()> {
    let channel = channel(&at.to_string(), &ChannelConfig::default(), identity, Role::Worker)?;
    WorkerClient::new(channel).watch(WatchRequest::default()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_where_routers_keep_the_leases() -> anyhow::Result<()> {
    rotate(|_| Ok((None, Vec::new()))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_where_etcd_keeps_them() -> anyhow::Result<()> {
    rotate(|home| {
        let file = |flag: &str, name: &str| format!("--{flag}={}", home.join(SERVER).join(name).display());
        let flags = [file("cert-file", "tls.crt"), file("key-file", "tls.key"), file("trusted-ca-file", "ca.crt")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(["--client-cert-auth"]).collect();
        let etcd = EtcdServer::start_with(&flags)?;
        let membership = vec!["--membership=etcd".into(), format!("--etcd={}", etcd.url())];
        Ok((Some(etcd), membership))
    })
    .await
}
