//! A cluster whose membership etcd keeps, as `baton up` starts it.

use anyhow::ensure;
use baton_node::testing::etcd::EtcdServer;
use baton_tests::http::Api;
use baton_tests::processes::{Up, wait_gone};
use serde_json::json;
use std::time::{Duration, Instant};

/// Weights that are made in no time.
const RANDOM: &str = "--model=random:vocab=300,context=1024";
/// Leases of workers and routers.
const LEASE: (&str, &str) = ("BATON_MEMBERSHIP__ETCD__LEASE_TTL_S", "2");
/// Longer than a lease.
const LONG: Duration = Duration::from_secs(6);

/// Token ids of a completion over HTTP.
async fn complete(up: &Up) -> anyhow::Result<Vec<u64>> {
    let body = json!({"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
    let answer = Api::new(up.openai()?).post("completions", body).await?;
    ensure!(answer.status == 200 && answer.tokens().len() == 8, "{answer:?}");
    Ok(answer.tokens())
}

#[tokio::test]
async fn serving_goes_on_whatever_becomes_of_etcd() -> anyhow::Result<()> {
    let mut etcd = EtcdServer::start()?;
    let (url, prefix) = (format!("--etcd={}", etcd.url()), "--etcd-prefix=/baton/test/");
    let flags = [
        "--grpc-port=0",
        "--http-port=0",
        RANDOM,
        "--prefill=2",
        "--decode=2",
        "--prefill-policy=remote",
        "--membership=etcd",
        &url,
        prefix,
    ];
    let mut up = Up::spawn(&flags, &[LEASE])?;
    up.wait_serving()?;
    let children = up.children()?;
    let first = complete(&up).await?;
    let serves = async |what: &str, time: Duration| -> anyhow::Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            ensure!(complete(&up).await? == first, "{what}: another answer");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    };
    etcd.signal("STOP")?;
    serves("stopped for longer than the lease", LONG).await?;
    etcd.signal("CONT")?;
    serves("resumed", Duration::from_secs(3)).await?;
    etcd.kill();
    serves("dead", Duration::from_secs(2)).await?;
    etcd.wipe()?;
    etcd.run()?;
    serves("wiped", Duration::from_secs(5)).await?;
    up.stop()?;
    wait_gone(&children)
}
