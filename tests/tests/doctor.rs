//! `baton doctor` as a user runs it: its report, its JSON, its exit status, and two of them on one host.

use anyhow::{Context, Result, ensure};
use baton_node::testing::etcd::EtcdServer;
use baton_tests::processes::{baton, binary, send};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

/// Verdict of the check whose name begins so, in the output of `--json`.
fn verdict(output: &Output, check: &str) -> Result<String> {
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let one = findings.iter().find(|f| f["check"].as_str().is_some_and(|name| name.starts_with(check)));
    let one = one.with_context(|| format!("no {check} in {findings:?}"))?;
    let told = one["verdict"].as_str().context("a verdict")?;
    ensure!(told != "failure" || one["remedy"].is_string(), "a failure without a remedy: {one}");
    Ok(told.to_owned())
}

#[test]
fn a_host_is_looked_at() -> Result<()> {
    let plain = baton(&["doctor", "--json"])?;
    ensure!(plain.status.success(), "{plain:?}");
    for check in ["processor", "memory", "memlock", "open files", "rdma", "gpu", "gpudirect", "ucx"] {
        let told = verdict(&plain, check)?;
        ensure!(told != "failure", "{check} fails though nothing was asked for: {told}");
    }
    let told = String::from_utf8(baton(&["doctor"])?.stdout)?;
    ensure!(told.contains("ok    ucx") && told.contains("tcp ("), "{told}");
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        println!("skipped: what is missing for RDMA is not missing here");
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
    let both = baton(&["doctor", "--json", "--etcd", &format!("{},http://127.0.0.1:1", etcd.url())])?;
    ensure!(both.status.code() == Some(1), "{both:?}");
    ensure!(verdict(&both, "etcd http://127.0.0.1:1")? == "failure", "{both:?}");
    ensure!(verdict(&both, &format!("etcd {}", etcd.url()))? != "failure", "{both:?}");
    Ok(())
}

#[test]
fn one_doctor_moves_kv_to_another() -> Result<()> {
    let mut command = Command::new(binary("baton")?);
    let mut listens = command.args(["doctor", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).spawn()?;
    let stdout = BufReader::new(listens.stdout.take().context("piped")?);
    let mut lines = stdout.lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.strip_prefix("listens on ")?.split_once(';')?.0.to_owned()));
    let measured = baton(&["doctor", "--json", "--connect", &address.context("it ended")?]);
    send("INT", listens.id())?;
    let ended = listens.wait()?;
    let measured = measured?;
    ensure!(ended.success() && measured.status.success(), "{ended} {measured:?}");
    for check in ["reach", "clock", "kv transfer"] {
        ensure!(verdict(&measured, check)? == "ok", "{measured:?}");
    }
    Ok(())
}
