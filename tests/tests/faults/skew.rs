//! Clusters of several versions: a prefill worker of another kernel revision, or of another protocol. No request fails, no answer
//! differs, and capacity that nobody can use shows in the metrics.

use anyhow::{Context, ensure};
use baton_kernels::numerics::KERNEL_REVISION;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{GenerateRequest, Sampling, Segment, TokenIds, segment::Kind};
use baton_router::{Router, RouterConfig, RunningRouter};
use baton_tests::load::{Case, Load};
use baton_tests::quiet::QUIET_MAX;
use baton_tests::scrape::{find, sum};
use baton_tests::service::Service;
use baton_tests::skewed::{self, Skew};
use baton_types::{ProtocolRange, Role};
use std::time::{Duration, Instant};

/// A slab of another revision is half as long: GEMMs are longer than that.
const MODEL: &str = "random:hidden=192,layers=2,heads=4,kv_heads=2,vocab=300,context=512,seed=29";
/// A larger one: its answers take long enough for something to happen in their middle.
const SLOW: &str = "random:hidden=384,layers=6,heads=6,kv_heads=2,vocab=300,context=512,seed=30";
/// Tokens of such an answer.
const LONG: usize = 200;
const CASES: [Case; 4] =
    [Case::new(120, 12, false), Case::new(90, 20, true), Case::new(60, 8, false), Case::new(130, 30, true)];
/// Longest wait for anything that must come.
const MAX: Duration = Duration::from_secs(60);
/// So often each cluster is asked.
const ANSWERS: u64 = 60;

/// Not a test of its own: a worker of another version.
#[test]
#[ignore = "run by the tests of this file, in a process of its own"]
fn role_of_the_other_process() -> anyhow::Result<()> {
    skewed::play()
}

/// A router, and the flags with which workers join it.
struct Cluster {
    router: RunningRouter,
    grpc: String,
    join: String,
    model: &'static str,
}

impl Cluster {
    async fn start(protocol: ProtocolRange) -> anyhow::Result<Self> {
        let mut config = RouterConfig::default();
        config.grpc.listen.set_port(0);
        config.http.listen.set_port(0);
        config.cluster.listen.set_port(0);
        config.placement.local_prefill_tokens_max = 16;
        config.membership.protocol = protocol;
        let router = Router::start(config).await?;
        let grpc = format!("http://{}", router.grpc_addr);
        let join = router.cluster_addr.to_string();
        Ok(Self { router, grpc, join, model: MODEL })
    }

    fn flags(&self, name: &str) -> Vec<String> {
        let fixed = ["--grpc-listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--threads=1", "--log=warn"];
        let own = [format!("--model={}", self.model), format!("--routers={}", self.join), format!("--instance={name}")];
        fixed.into_iter().map(str::to_owned).chain(own).collect()
    }

    /// A worker of this build.
    fn worker(&self, role: Role, name: &str) -> anyhow::Result<Service> {
        Service::start(&format!("baton-{}-worker", role.name()), &self.flags(name))
    }

    fn skewed(&self, role: Role, name: &str, skew: Skew) -> anyhow::Result<Service> {
        skewed::start(role, skew, &self.flags(name))
    }

    /// Waits until so many prefill and decode workers are ready, of which so many are unpaired.
    async fn settles(&self, ready: [u64; 2], unpaired: [u64; 2]) -> anyhow::Result<()> {
        let (url, until) = (format!("http://{}/metrics", self.router.http_addr), Instant::now() + MAX);
        loop {
            let mut found = [[0; 2]; 2];
            for (i, role) in ["role=\"prefill\"", "role=\"decode\""].into_iter().enumerate() {
                found[0][i] = find(&url, "baton_router_ready_workers", &[role]).await? as u64;
                found[1][i] = sum(&url, "baton_router_unpaired_workers", &[role]).await? as u64;
            }
            if found == [ready, unpaired] {
                return Ok(());
            }
            ensure!(Instant::now() < until, "ready and unpaired workers are {found:?}, not {ready:?} and {unpaired:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Tokens that a worker has sampled: one for each prompt of a prefill worker.
async fn sampled(worker: &mut Service) -> anyhow::Result<u64> {
    Ok(find(&worker.metrics().await?, "baton_generated_tokens_total", &[]).await? as u64)
}

/// Whether a sequence runs there.
async fn busy(worker: &mut Service) -> anyhow::Result<bool> {
    Ok(find(&worker.metrics().await?, "baton_sequences_running", &[]).await? > 0.0)
}

/// Waits until clients got some more answers, all of them right.
async fn goes_on(load: &Load, what: &str) -> anyhow::Result<()> {
    let (until, wanted) = (Instant::now() + MAX, load.answered()? + ANSWERS);
    while load.answered().with_context(|| what.to_owned())? < wanted {
        ensure!(Instant::now() < until, "{what}: fewer than {ANSWERS} answers in {MAX:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

async fn quiet(worker: &mut Service) -> anyhow::Result<()> {
    let (url, until) = (worker.metrics().await?, Instant::now() + QUIET_MAX);
    while find(&url, "baton_kv_blocks", &["referenced"]).await?
        + find(&url, "baton_kv_blocks", &["quarantined"]).await?
        > 0.0
    {
        ensure!(Instant::now() < until, "{url}: blocks are in use {QUIET_MAX:?} after the last request");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// A cluster at work that a prefill worker of another kernel revision has joined: the same for the hazard and its guard, which is what
/// that worker says of itself.
struct Mixed {
    cluster: Cluster,
    decode: Service,
    ours: Service,
    other: Service,
    load: Load,
}

impl Mixed {
    async fn start(skew: Skew, unpaired: [u64; 2]) -> anyhow::Result<Self> {
        let cluster = Cluster::start(ProtocolRange::CURRENT).await?;
        let decode = cluster.worker(Role::Decode, "d-0")?;
        let mut ours = cluster.worker(Role::Prefill, "p-0")?;
        cluster.settles([1, 1], [0, 0]).await?;
        let load = Load::start(std::slice::from_ref(&cluster.grpc), &CASES).await?;
        goes_on(&load, "all of one revision").await?;
        ensure!(sampled(&mut ours).await? > 0, "nothing is prefilled remotely: the rest shows nothing");
        let other = cluster.skewed(Role::Prefill, "p-1", skew)?;
        cluster.settles([2, 1], unpaired).await?;
        Ok(Self { cluster, decode, ours, other, load })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_of_another_kernel_revision_is_left_out_until_it_is_upgraded() -> anyhow::Result<()> {
    let Mixed { cluster, mut decode, mut ours, mut other, load } = Mixed::start(Skew::Revision, [1, 0]).await?;
    goes_on(&load, "a prefill worker of another revision beside").await?;
    ours.terminate().await?;
    cluster.settles([1, 1], [1, 1]).await?;
    goes_on(&load, "a prefill worker of another revision alone").await?;
    ensure!(sampled(&mut other).await? == 0, "the prefill worker of another revision was given a prompt");

    other.terminate().await?;
    let mut upgraded = cluster.worker(Role::Prefill, "p-1")?;
    cluster.settles([1, 1], [0, 0]).await?;
    goes_on(&load, "upgraded").await?;
    ensure!(sampled(&mut upgraded).await? > 0, "the upgraded prefill worker is given nothing");
    let (answers, _) = load.stop().await?;
    println!("{answers} right answers, none wrong, none failed");
    quiet(&mut decode).await?;
    for service in [&mut upgraded, &mut decode] {
        service.terminate().await?;
    }
    cluster.router.stop().await;
    Ok(())
}

/// The hazard: KV of other kernels under the name of ours.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_revision_in_its_class_such_a_worker_makes_wrong_answers() -> anyhow::Result<()> {
    let Mixed { load, cluster: _cluster, decode: _decode, ours: _ours, other: _other } =
        Mixed::start(Skew::HiddenRevision, [0, 0]).await?;
    let until = Instant::now() + MAX;
    while load.answered().is_ok() && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let wrong = load.stop().await.err().context("no answer is wrong: the test beside this one shows nothing")?;
    ensure!(wrong.to_string().contains("wrong: "), "{wrong}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbouring_protocols_interoperate_and_distant_ones_are_left_out() -> anyhow::Result<()> {
    let (old, new, newest) =
        (ProtocolRange { min: 1, max: 1 }, ProtocolRange { min: 1, max: 2 }, ProtocolRange { min: 2, max: 3 });
    let cluster = Cluster::start(new).await?;
    let mut decode = cluster.skewed(Role::Decode, "d-0", Skew::Protocol(new))?;
    cluster.settles([0, 1], [0, 0]).await?;
    let load = Load::start(std::slice::from_ref(&cluster.grpc), &CASES).await?;

    // N-1 beside N: they speak what both know.
    let mut previous = cluster.skewed(Role::Prefill, "p-0", Skew::Protocol(old))?;
    cluster.settles([1, 1], [0, 0]).await?;
    goes_on(&load, "a prefill worker of the protocol before").await?;
    ensure!(sampled(&mut previous).await? > 0, "the prefill worker of protocol N-1 is given nothing");

    // A decode worker that no longer speaks N-1 pairs with none that speaks nothing newer. The router knows both.
    let mut next = cluster.skewed(Role::Decode, "d-1", Skew::Protocol(newest))?;
    cluster.settles([1, 2], [0, 1]).await?;
    goes_on(&load, "a decode worker of the protocol after").await?;
    decode.terminate().await?;
    cluster.settles([1, 1], [1, 1]).await?;
    let before = sampled(&mut previous).await?;
    goes_on(&load, "protocols without a common version").await?;
    ensure!(sampled(&mut previous).await? == before, "a prompt went to a prefill worker that pairs with nobody");
    previous.terminate().await?;

    // What the router itself does not speak is refused with both ranges, and takes no part.
    let mut distant = cluster.skewed(Role::Prefill, "p-1", Skew::Protocol(ProtocolRange { min: 7, max: 9 }))?;
    let until = Instant::now() + MAX;
    while !distant.stderr().contains("the worker speaks protocols 7 to 9, this router 1 to 2") {
        ensure!(Instant::now() < until, "it is not told why it is refused:\n{}", distant.stderr());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let ready = reqwest::get(format!("http://{}/readyz", distant.listening().await?.1)).await?.text().await?;
    ensure!(ready.contains("speaks protocols 7 to 9, this router 1 to 2"), "{ready}");
    goes_on(&load, "a prefill worker that the router refuses").await?;
    cluster.settles([0, 1], [0, 0]).await?;
    let (answers, _) = load.stop().await?;
    println!("{answers} right answers, none wrong, none failed");
    quiet(&mut next).await?;
    for service in [&mut distant, &mut next] {
        service.terminate().await?;
    }
    cluster.router.stop().await;
    Ok(())
}

/// A long greedy answer: its tokens, and the classes that its end names. `first` is called once the first token is there.
async fn ask(
    cluster: &Cluster,
    first: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<(Vec<u32>, Vec<String>)> {
    let sampling =
        Sampling { max_tokens: Some(LONG as u32), ignore_eos: true, temperature: Some(0.0), ..Sampling::default() };
    let prompt = vec![Segment { kind: Some(Kind::Tokens(TokenIds { ids: vec![7, 8, 9] })) }];
    let request = GenerateRequest { prompt, sampling: Some(sampling), ..GenerateRequest::default() };
    let mut client = InferenceClient::connect(cluster.grpc.clone()).await?;
    let mut stream = client.generate(request).await?.into_inner();
    let mut tokens = stream.message().await?.context("a first token")?.token_ids;
    first().await?;
    loop {
        let message = stream.message().await?.context("the answer ended early")?;
        tokens.extend(message.token_ids);
        if message.usage.is_some() {
            return Ok((tokens, message.crossed_classes));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_whose_class_is_gone_goes_on_at_another_and_says_so() -> anyhow::Result<()> {
    let cluster = Cluster { model: SLOW, ..Cluster::start(ProtocolRange::CURRENT).await? };
    let mut workers = [cluster.worker(Role::Decode, "d-0")?, cluster.skewed(Role::Decode, "d-1", Skew::Revision)?];
    cluster.settles([0, 2], [0, 0]).await?;
    let (tokens, classes) = ask(&cluster, async || {
        for worker in &mut workers {
            if busy(worker).await? {
                return worker.signal("KILL");
            }
        }
        anyhow::bail!("the answer was over before anything could happen to it")
    })
    .await?;
    let mut revisions: Vec<_> = classes.iter().filter_map(|class| class.rsplit('/').next()).collect();
    revisions.sort_unstable();
    let expected = [KERNEL_REVISION, KERNEL_REVISION + 1].map(|revision| format!("r{revision}"));
    ensure!(revisions == expected && tokens.len() == LONG, "{} tokens, by {classes:?}", tokens.len());
    // The next one begins where the other ended, and is not marked.
    ensure!(ask(&cluster, async || Ok(())).await?.1.is_empty(), "an answer of one class is marked");
    Ok(())
}
