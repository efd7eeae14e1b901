//! Puts of the transfer service against a bare UCX loop: what `kv-transfer`'s example `put_bench` measures between processes.

use crate::summary::{Figure, Summary, Target};
use anyhow::{Context, ensure};
use baton_tests::processes::binary;
use serde::Deserialize;
use std::process::Command;

#[derive(Deserialize)]
struct Line {
    name: String,
    #[serde(flatten)]
    figure: Figure,
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("puts of 6, 48 and 384 KiB between two processes");
    let output = Command::new(binary("examples/put_bench")?).output().context("cannot run put_bench")?;
    ensure!(output.status.success(), "put_bench failed: {}", String::from_utf8_lossy(&output.stderr));
    for line in String::from_utf8(output.stdout)?.lines() {
        let Line { name, figure } = serde_json::from_str(line).with_context(|| format!("put_bench said {line:?}"))?;
        let target = (name.starts_with("kv_put_") && name.ends_with("kib")).then_some(Target::AtLeast(0.9));
        summary.add(&name, figure, target);
    }
    Ok(())
}
