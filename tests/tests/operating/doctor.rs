//! `baton doctor` as a user runs it: its report, its JSON, its exit status, and two of them on one host.

use anyhow::{Context, Result, ensure};
use baton_node::testing::etcd::EtcdServer;
use baton_skips::{Need, skipped};
use baton_tests::processes::{baton, binary, send};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

/// Verdict of the check whose name begins so, in the output of `--json`.
fn verdict(output: &Output, check: &str) -> Result<String> {
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let is_it = |name: &str| name.strip_prefix(check).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '));
    let one = findings.iter().find(|f| f["check"].as_str().is_some_and(is_it));
    let one = one.with_context(|| format!("no {check} in {findings:?}"))?;
    let told = one["verdict"].as_str().context("a verdict")?;
    ensure!(told != "failure" || one["remedy"].is_string(), "a failure without a remedy: {one}");
    Ok(told.to_owned())
}

#[test]
fn a_host_is_looked_at() -> Result<()> {
    let plain = baton(&["doctor", "--json"])?;
    ensure!(plain.status.success(), "{plain:?}");
    for check in ["processor", "memory", "memlock", "open files", "rdma", "gpu", "ucx"] {
        let told = verdict(&plain, check)?;
        ensure!(told != "failure", "{check} fails though nothing was asked for: {told}");
    }
    let told = String::from_utf8(baton(&["doctor"])?.stdout)?;
    if !std::path::Path::new("/proc/driver/nvidia/version").exists() {
        let of_gpus: Vec<&str> = told.lines().filter(|line| line.contains("gpu")).collect();
        ensure!(of_gpus.len() == 1 && of_gpus[0].ends_with("no driver: workers compute on the CPU"), "{told}");
        let gpu = baton(&["doctor", "--json", "--gpu", "--cuda-kernels", "/no/such/folder"])?;
        ensure!(gpu.status.code() == Some(1) && verdict(&gpu, "gpu")? == "failure", "{gpu:?}");
        ensure!(verdict(&gpu, "gpu kernels")? == "failure", "{gpu:?}");
    }
    ensure!(told.contains("ok    ucx") && told.contains("posix ("), "{told}");
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        skipped(Need::NoRdma, "what `baton doctor --rdma` says without RDMA", "there is a device");
        return Ok(());
    }
    let rdma = baton(&["doctor", "--json", "--rdma"])?;
    ensure!(rdma.status.code() == Some(1) && verdict(&rdma, "rdma")? == "failure", "{rdma:?}");
    Ok(())
}

#[test]
fn etcd_is_asked_node_by_node() -> Result<()> {
    let etcd = EtcdServer::start()?;
    let there = baton(&["doctor", "--json", "--etcd", &etcd.url()])?;
    ensure!(there.status.success() && verdict(&there, "etcd")? != "failure", "{there:?}");
    // A worker goes on with the nodes that are left.
    let both = baton(&["doctor", "--json", "--etcd", &format!("{},http://127.0.0.1:1", etcd.url())])?;
    ensure!(both.status.success() && verdict(&both, "etcd http://127.0.0.1:1")? == "warning", "{both:?}");
    ensure!(verdict(&both, &format!("etcd {}", etcd.url()))? != "failure", "{both:?}");
    let none = baton(&["doctor", "--json", "--etcd", "http://127.0.0.1:1,http://127.0.0.1:2"])?;
    ensure!(none.status.code() == Some(1) && verdict(&none, "etcd http://127.0.0.1:1")? == "failure", "{none:?}");
    Ok(())
}

#[test]
fn what_a_worker_is_to_have_is_asked_for() -> Result<()> {
    // UCX has its own words about a device that is not there: they must not stand in the JSON.
    let missing = baton(&["doctor", "--json", "--pool-bytes", "40GiB", "--ucx-net-devices", "lo,mlx5_99:1"])?;
    ensure!(missing.status.code() == Some(1) && verdict(&missing, "device mlx5_99:1")? == "failure", "{missing:?}");
    ensure!(verdict(&missing, "ucx")? == "failure", "lo has no lane but TCP: {missing:?}");
    let nothing = baton(&["doctor", "--json", "--ucx-net-devices", "mlx5_99:1"])?;
    ensure!(nothing.status.code() == Some(1) && verdict(&nothing, "ucx")? == "failure", "{nothing:?}");
    let words = String::from_utf8_lossy(&nothing.stderr).into_owned();
    ensure!(words.contains("mlx5_99:1") && words.contains("UCX"), "UCX's words are lost: {words}");
    for wrong in [["--pool-bytes", "much"], ["--ucx-net-devices", "all,lo"]] {
        let refused = baton(&[&["doctor"][..], &wrong].concat())?;
        ensure!(refused.status.code() == Some(2), "{wrong:?}: {refused:?}");
    }
    Ok(())
}

/// What a doctor with these arguments finds of one that listens with those.
fn between(listens: &[&str], connects: &[&str]) -> Result<Output> {
    let mut command = Command::new(binary("baton")?);
    command.args(["doctor", "--listen", "127.0.0.1:0"]).args(listens);
    let mut listens = command.stdout(Stdio::piped()).spawn()?;
    let stdout = BufReader::new(listens.stdout.take().context("piped")?);
    let mut lines = stdout.lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.strip_prefix("listens on ")?.split_once(';')?.0.to_owned()));
    let address = address.context("it ended")?;
    let measured = baton(&[&["doctor", "--json", "--connect", &address], connects].concat());
    send("INT", listens.id())?;
    let ended = listens.wait()?;
    ensure!(ended.success(), "{ended} {measured:?}");
    measured
}

#[test]
fn one_doctor_moves_kv_to_another() -> Result<()> {
    let measured = between(&[], &[])?;
    ensure!(measured.status.success(), "{measured:?}");
    for check in ["reach", "clock", "kv transfer"] {
        ensure!(verdict(&measured, check)? == "ok", "{measured:?}");
    }
    Ok(())
}

#[test]
fn kv_moves_over_the_lanes_of_both_sides() -> Result<()> {
    let named = between(&[], &["--ucx-tls", "posix,self"])?;
    ensure!(named.status.success() && verdict(&named, "kv transfer")? == "ok", "{named:?}");
    let there = between(&["--ucx-net-devices", "mlx5_99:1"], &["--ucx-tls", "ib"])?;
    ensure!(there.status.code() == Some(1) && verdict(&there, "kv transfer")? == "failure", "{there:?}");
    let told = String::from_utf8_lossy(&there.stdout).into_owned();
    ensure!(told.contains("the other host cannot start") && told.contains("--ucx-net-devices"), "{told}");
    let rdma = between(&[], &["--rdma"])?;
    ensure!(rdma.status.code() == Some(1) && verdict(&rdma, "kv transfer")? == "failure", "KV went by TCP: {rdma:?}");
    Ok(())
}
