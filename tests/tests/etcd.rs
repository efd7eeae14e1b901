//! A cluster whose membership a replicated etcd keeps, as `baton up` starts it, while etcd fails in every way: no answer is lost or
//! wrong, and no live worker leaves the view of a router that watches.

use anyhow::{Context, ensure};
use baton_node::identity::{Identity, IdentityConfig, Role};
use baton_node::membership::etcd::{EtcdConfig, EtcdRouter, OfflineSources};
use baton_node::membership::{MembershipView, RouterMembership as _};
use baton_node::testing::etcd::{EtcdCluster, EtcdServer};
use baton_node::testing::relay::Relay;
use baton_tests::http::Api;
use baton_tests::load::{Case, Load};
use baton_tests::processes::{Up, send, wait_gone};
use baton_tests::scrape::{find, sum};
use baton_tests::service::{Service, free_addresses};
use baton_types::Party;
use etcd_client::{Client, CompactionOptions};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::RwLock;
use tokio::time::{sleep, timeout};

/// A model that computes in no time.
const MODEL: &str = "--model=random:hidden=64,layers=3,heads=4,kv_heads=2,vocab=500,context=1024,seed=11";
/// Some prefill where they decode, some elsewhere.
const CASES: [Case; 3] = [Case::new(400, 40, false), Case::new(20, 30, true), Case::new(300, 120, true)];
const PREFIX: &str = "/baton/test/";
/// Leases of workers and routers, and the wait for everyone after a wipe.
const SHORT: [(&str, &str); 2] =
    [("BATON_MEMBERSHIP__ETCD__LEASE_TTL_S", "2"), ("BATON_MEMBERSHIP__ETCD__VIEW_GRACE_MS", "5000")];
/// Leases of two seconds need a machine that other clusters do not keep busy: the test of all faults runs alone in this process.
static MACHINE: RwLock<()> = RwLock::const_new(());
/// Longer than a lease, and than a probe of a silent connection.
const LONG: Duration = Duration::from_secs(7);
/// Longest wait for what must come.
const MAX: Duration = Duration::from_secs(60);

/// A router's view, watched for whole runs.
struct Observer {
    router: EtcdRouter,
    parties: BTreeSet<Party>,
}

impl Observer {
    async fn start(config: &EtcdConfig, workers: usize, identity: &Identity) -> anyhow::Result<Self> {
        let router = EtcdRouter::start_as(config, 16, identity, OfflineSources::default());
        let mut view = router.view();
        let whole = timeout(MAX, view.wait_for(|v| v.members.len() == workers)).await??.clone();
        Ok(Self { router, parties: whole.members.values().map(|m| m.record.party.clone()).collect() })
    }

    /// Workers that are not in the view, as this start of them.
    fn missing(&self) -> BTreeSet<Party> {
        let view = self.router.view();
        self.parties.iter().filter(|p| view.borrow().get(p).is_none()).cloned().collect()
    }

    async fn sees(&self, what: &str, done: impl Fn(&MembershipView) -> bool) -> anyhow::Result<Arc<MembershipView>> {
        let mut view = self.router.view();
        let seen = timeout(MAX, view.wait_for(|v| done(v))).await.with_context(|| format!("{what}: never"))?;
        Ok(seen?.clone())
    }
}

/// A router of the cluster, as its workers see it: they answer nobody else.
async fn a_router_of(up: &Up) -> anyhow::Result<Identity> {
    let (_, operator) = up.cluster()?;
    let dir = operator.with_file_name(Role::Router.name());
    Ok(Identity::start(&IdentityConfig { dir: Some(dir), ..IdentityConfig::default() }, Role::Router).await?)
}

/// Whether all workers but `without` are ready, as their probes say.
async fn all_ready(up: &Up, without: &str) -> anyhow::Result<()> {
    for name in ["prefill-0", "prefill-1", "decode-0", "decode-1"].into_iter().filter(|name| *name != without) {
        let answer = reqwest::get(up.metrics(name)?.replace("/metrics", "/readyz")).await?;
        let status = answer.status();
        ensure!(status.is_success(), "{name} is not ready: {status}: {}", answer.text().await?);
    }
    Ok(())
}

/// What stands in etcd, past all relays.
async fn records(config: &EtcdConfig) -> anyhow::Result<i64> {
    let options = etcd_client::GetOptions::new().with_prefix().with_count_only();
    let mut client = Client::connect(&config.endpoints, None).await?;
    Ok(client.get(format!("{PREFIX}instances/"), Some(options)).await?.count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_cluster_under_the_same_prefix_is_refused() -> anyhow::Result<()> {
    let _shared = MACHINE.read().await;
    let etcd = EtcdServer::start()?;
    let url = format!("--etcd={}", etcd.url());
    let start = |prefix: &str| {
        let prefix = format!("--etcd-prefix={prefix}");
        Up::spawn(&["--grpc-port=0", "--http-port=0", MODEL, "--membership=etcd", &url, &prefix], &SHORT)
    };
    let mut first = start(PREFIX)?;
    first.wait_serving()?;
    let observer =
        Observer::start(&EtcdConfig { prefix: PREFIX.into(), ..etcd.config() }, 2, &a_router_of(&first).await?).await?;

    let mut second = start(PREFIX)?;
    let (status, message) = (second.wait()?, second.stderr());
    ensure!(!status.success() && !second.stdout().contains("Baton serves"), "{status}:\n{message}");
    for part in [PREFIX, "decode-0, prefill-0", "--etcd-prefix"] {
        ensure!(message.contains(part), "{part:?} is not in:\n{message}");
    }
    ensure!(!message.contains("Stopping"), "something was started:\n{message}");
    ensure!(observer.missing().is_empty(), "{:?} lost their names", observer.missing());

    let mut beside = start("/baton/beside/")?;
    beside.wait_serving()?;
    beside.stop()?;
    first.stop()?;
    let mut after = start(PREFIX)?;
    after.wait_serving()?;
    after.stop()
}

/// Waits until a router has so many ready decode workers.
async fn has_decoders(metrics: &str, wanted: f64) -> anyhow::Result<()> {
    let until = Instant::now() + MAX;
    loop {
        let ready = find(metrics, "baton_router_ready_workers", &["decode"]).await?;
        if ready == wanted {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{ready} decode workers are ready, not {wanted}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_is_cut_off_from_etcd_serves_from_its_last_view() -> anyhow::Result<()> {
    let _shared = MACHINE.read().await;
    let etcd = EtcdServer::start()?;
    let direct = EtcdConfig { prefix: PREFIX.into(), ..etcd.config() };
    let relay = Relay::start(etcd.address()).await?;
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[membership.etcd]\nlease_ttl_s = 2\nview_grace_ms = 5000\n")?;
    let start = |program: &str, etcd: &str, own: Vec<String>| {
        let config = format!("--config={}", config.display());
        let common = [config, format!("--etcd=http://{etcd}"), format!("--etcd-prefix={PREFIX}")];
        let flags = ["--membership=etcd", "--log=warn"].into_iter().map(str::to_owned).chain(common).chain(own);
        Service::start(program, &flags.collect::<Vec<_>>())
    };
    let worker = |role: &str, name: &str| {
        let fixed = ["--grpc-listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--threads=1", MODEL];
        let own = fixed.into_iter().map(str::to_owned).chain([format!("--instance={name}")]);
        start(&format!("baton-{role}-worker"), &etcd.address(), own.collect())
    };
    // Only the router's link with etcd can be cut.
    let listens =
        ["--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--cluster-listen=127.0.0.1:0"].map(str::to_owned);
    let mut router = start("baton-router", relay.address(), listens.to_vec())?;
    let mut prefill = worker("prefill", "p-0")?;
    let (mut stays, mut leaves) = (worker("decode", "d-0")?, worker("decode", "d-1")?);
    for worker in [&mut prefill, &mut stays, &mut leaves] {
        worker.ready().await?;
    }
    let (url, metrics) = (format!("http://{}", router.listening().await?.0), router.metrics().await?);
    has_decoders(&metrics, 2.0).await?;
    let load = Load::start(&[url], &CASES).await?;
    load.goes_on("undisturbed", Duration::from_secs(1)).await?;

    relay.set_silent(true);
    load.goes_on("the router is cut off from etcd", LONG).await?;
    has_decoders(&metrics, 2.0).await?;
    // It sees who leaves by its own streams, and nobody who joins.
    leaves.terminate().await?;
    has_decoders(&metrics, 1.0).await?;
    let mut comes = worker("decode", "d-2")?;
    let all = Observer::start(&direct, 3, &Identity::default()).await?;
    load.goes_on("a worker left, and another joined", LONG).await?;
    ensure!(all.missing().is_empty(), "{:?} lost their leases", all.missing());
    has_decoders(&metrics, 1.0).await?;
    let generated = comes.metrics().await?;
    let tokens = async || find(&generated, "baton_generated_tokens_total", &[]).await;
    ensure!(tokens().await? == 0.0, "a worker that the router cannot know works for it");

    relay.set_silent(false);
    comes.ready().await?;
    has_decoders(&metrics, 2.0).await?;
    load.goes_on("the link is back", Duration::from_secs(2)).await?;
    ensure!(tokens().await? > 0.0, "the worker that joined is given nothing");
    let (answers, _) = load.stop().await?;
    println!("{answers} right answers, none wrong, none failed");
    for service in [&mut router, &mut prefill, &mut stays, &mut comes] {
        service.terminate().await?;
    }
    Ok(())
}

/// One greedy answer, token by token.
async fn answer(router: &Service, http: &str) -> anyhow::Result<Vec<u64>> {
    let body = json!({"prompt": (0..300).collect::<Vec<u32>>(), "max_tokens": 24, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true, "prefill_policy": "remote"});
    let answer = Api::new(http.to_owned()).post("completions", body).await?;
    ensure!(answer.status == 200, "{answer:?}\n{}", router.stderr());
    ensure!(answer.tokens().len() == 24, "{answer:?}");
    Ok(answer.tokens())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_starts_while_etcd_is_away_serves() -> anyhow::Result<()> {
    let _shared = MACHINE.read().await;
    let mut etcd = EtcdServer::start()?;
    let (url, folder) = (etcd.url(), tempfile::tempdir()?);
    let listens = free_addresses::<5>()?;
    let start = |program: &str, membership: &str, own: &[String]| {
        let file = folder.path().join(format!("{program}-{}.toml", own[0].replace([':', '/'], "_")));
        let etcd = format!("prefix = {PREFIX:?}\nendpoints = [{:?}]\nlease_ttl_s = 2\nview_grace_ms = 5000\n", url);
        std::fs::write(&file, format!("[membership]\nbackend = \"etcd\"\n{membership}[membership.etcd]\n{etcd}"))?;
        let common = [format!("--config={}", file.display()), "--log=warn".into()];
        Service::start(program, &[&common[..], own].concat())
    };
    let worker = |role: &str, name: &str, grpc: usize| {
        let fixed = ["--admin-listen=127.0.0.1:0", "--threads=1", MODEL].map(str::to_owned);
        let own = [format!("--instance={name}"), format!("--grpc-listen={}", listens[grpc])];
        start(&format!("baton-{role}-worker"), "", &[&own[..], &fixed[..]].concat())
    };
    let mut workers = [worker("prefill", "p-0", 0)?, worker("decode", "d-0", 1)?, worker("decode", "d-1", 2)?];
    let cluster = "--cluster-listen=127.0.0.1:0".to_owned();
    let own = [format!("--http-listen={}", listens[3]), format!("--grpc-listen={}", listens[4]), cluster];
    let (http, grpc) = (format!("http://{}/v1", listens[3]), vec![format!("http://{}", listens[4])]);
    let metrics = format!("http://{}/metrics", listens[3]);
    let registered = async || find(&metrics, "baton_router_registered_workers", &[]).await;
    let remembers = format!("cache_dir = {:?}\n", folder.path().join("cache"));
    // The names of the hosts are those of the workers, as of a headless service; one of them leads nowhere.
    let seeds: Vec<String> = listens[..4].iter().map(|at| format!("localhost:{}", at.port())).collect();
    let mut router = start("baton-router", &remembers, &own)?;
    for service in workers.iter_mut().chain([&mut router]) {
        service.ready().await?;
    }
    has_decoders(&metrics, 2.0).await?;
    let expected = answer(&router, &http).await?;
    // Nothing waits for the file in `cache_dir`: a router that is told to end first writes what it has gathered.

    for membership in [remembers, format!("seeds = {seeds:?}\n")] {
        etcd.kill();
        router.terminate().await?;
        router = start("baton-router", &membership, &own)?;
        router.ready().await.context(membership.clone())?;
        has_decoders(&metrics, 2.0).await?;
        ensure!(answer(&router, &http).await? == expected, "another answer");
        let load = Load::start(&grpc, &CASES).await?;
        load.goes_on("etcd is away", LONG).await?;
        ensure!(find(&metrics, "baton_router_membership_up", &[]).await? == 0.0);
        ensure!(find(&metrics, "baton_router_unconfirmed_workers", &[]).await? == 3.0 && registered().await? == 3.0);
        ensure!(find(&metrics, "baton_router_problems", &["kind=\"etcd\""]).await? == 1.0, "it says nothing");

        etcd.run()?;
        let until = Instant::now() + MAX;
        while find(&metrics, "baton_router_unconfirmed_workers", &[]).await? != 0.0 {
            ensure!(Instant::now() < until, "the router does not follow etcd:\n{}", router.stderr());
            sleep(Duration::from_millis(20)).await;
        }
        load.goes_on("etcd is back", LONG).await?;
        load.stop().await?;
        ensure!(registered().await? == 3.0, "{} workers are registered", registered().await?);
        ensure!(find(&metrics, "baton_router_doubted_workers", &[]).await? == 0.0);
        let changes = async |change: &str| sum(&metrics, "baton_router_membership_changes_total", &[change]).await;
        ensure!(changes("\"joined\"").await? == 3.0 && changes("\"left\"").await? == 0.0, "somebody came or went");
        has_decoders(&metrics, 2.0).await?;
    }
    ensure!(answer(&router, &http).await? == expected, "another answer");
    for service in workers.iter_mut().chain([&mut router]) {
        service.terminate().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_fault_of_etcd_loses_an_answer() -> anyhow::Result<()> {
    etcd_fails(Duration::from_secs(6)).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes: etcd's quorum is lost for one"]
async fn a_long_loss_of_quorum_loses_no_answer() -> anyhow::Result<()> {
    etcd_fails(Duration::from_secs(60)).await
}

async fn etcd_fails(quorum_lost: Duration) -> anyhow::Result<()> {
    let _alone = MACHINE.write().await;
    let mut etcd = EtcdCluster::start(3)?;
    let direct = EtcdConfig { prefix: PREFIX.into(), view_grace_ms: 5_000, ..etcd.config() };
    let mut relays = Vec::new();
    for address in etcd.addresses() {
        relays.push(Relay::start(address).await?);
    }
    let urls: Vec<String> = relays.iter().map(|r| format!("http://{}", r.address())).collect();
    let (urls, prefix) = (format!("--etcd={}", urls.join(",")), format!("--etcd-prefix={PREFIX}"));
    let shape = ["--grpc-port=0", "--http-port=0", MODEL, "--prefill=2", "--decode=2", "--threads=1"];
    let flags: Vec<&str> = shape.into_iter().chain(["--membership=etcd", &urls, &prefix]).collect();
    let mut up = Up::spawn(&flags, &SHORT)?;
    up.wait_serving()?;
    let children = up.children()?;
    let observer = Observer::start(&direct, 4, &a_router_of(&up).await?).await?;
    let load = Load::start(&[format!("http://{}", up.grpc()?)], &CASES).await?;
    let goes_on = async |what: &str, time: Duration| -> anyhow::Result<()> {
        let whole = async {
            loop {
                let missing = observer.missing();
                ensure!(missing.is_empty(), "{missing:?} left the view");
                all_ready(&up, "").await?;
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            error = whole => error.with_context(|| what.to_owned()),
            answers = load.goes_on(what, time) => answers.map(drop),
        }
    };
    goes_on("undisturbed", Duration::from_secs(2)).await?;

    let leader = etcd.leader().await?;
    etcd.node(leader).kill();
    goes_on("leader killed", Duration::from_secs(4)).await?;
    etcd.run_all()?;
    goes_on("leader back", Duration::from_secs(2)).await?;

    let leader = etcd.leader().await?;
    etcd.node(leader).kill();
    etcd.node((leader + 1) % 3).kill();
    goes_on("quorum lost", quorum_lost).await?;
    etcd.run_all()?;
    goes_on("quorum back", Duration::from_secs(3)).await?;

    // Nobody but the observer reaches etcd: all leases end, and what the router watched is compacted away. An observer that hears a live
    // etcd say so may believe it of the first.
    relays.iter().for_each(|relay| relay.set_silent(true));
    load.goes_on("cut off from etcd", LONG).await?;
    ensure!(records(&direct).await? == 0, "leases do not end");
    let doubted = observer.router.doubted();
    ensure!(observer.missing().is_empty() && doubted == 4, "{:?}, {doubted} doubted", observer.missing());
    all_ready(&up, "").await?;
    let mut client = Client::connect(&direct.endpoints, None).await?;
    let revision = client.put("/elsewhere", "1", None).await?.header().context("a header")?.revision();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await?;
    relays.iter().for_each(|relay| relay.set_silent(false));
    load.goes_on("watch compacted", LONG).await?;
    observer.sees("all return", |view| observer.parties.iter().all(|p| view.get(p).is_some())).await?;
    ensure!(records(&direct).await? == 4, "they do not register again");

    let stopped = up.child("--instance=decode-1")?;
    let is_stopped = |p: &&Party| p.instance.as_str() == "decode-1";
    let party = observer.parties.iter().find(is_stopped).context("decode-1")?.clone();
    send("STOP", stopped)?;
    observer.sees("the lease of a stopped worker ends", |view| view.get(&party).is_none()).await?;
    load.goes_on("a worker stopped", LONG).await?;
    all_ready(&up, "decode-1").await?;
    ensure!(observer.missing().len() == 1, "{:?}", observer.missing());
    send("CONT", stopped)?;
    observer.sees("it returns as the same start", |view| view.get(&party).is_some()).await?;
    goes_on("it is back", Duration::from_secs(2)).await?;

    etcd.kill_all();
    etcd.wipe_all()?;
    goes_on("dead", Duration::from_secs(2)).await?;
    etcd.run_all()?;
    goes_on("wiped", LONG).await?;
    ensure!(records(&direct).await? == 4, "they do not register again");
    ensure!(observer.router.doubted() == 0, "{} are doubted", observer.router.doubted());

    let (answers, _) = load.stop().await?;
    println!("{answers} right answers, none wrong, none failed");
    up.stop()?;
    wait_gone(&children)
}
