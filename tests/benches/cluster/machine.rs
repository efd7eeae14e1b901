//! Where we run, and what processes take of it.

use anyhow::{Context, ensure};
use std::process::Command;
use std::time::{Duration, Instant};

/// Memory of this process that is resident, in bytes.
pub(crate) fn resident_bytes() -> anyhow::Result<f64> {
    status_bytes(std::process::id(), "VmRSS:")
}

/// A size that proc_pid_status(5) tells of a process, in bytes; `line` is how its line begins.
pub(crate) fn status_bytes(pid: u32, line: &str) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let size = status.lines().find_map(|l| l.strip_prefix(line)).with_context(|| format!("no {line} in status"))?;
    let kib: f64 = size.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib * 1024.0)
}

/// The children of a process, and theirs.
pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let mut all: Vec<u32> = listed.split_whitespace().filter_map(|p| p.parse().ok()).collect();
    for index in 0..all.len() {
        all.extend(descendants(all[index]));
    }
    all
}

/// The name of a process, at most 15 bytes of it.
pub(crate) fn name(pid: u32) -> anyhow::Result<String> {
    Ok(std::fs::read_to_string(format!("/proc/{pid}/comm"))?)
}

/// Keeps all threads of a process on one core.
pub(crate) fn pin(pid: u32, core: usize) -> anyhow::Result<()> {
    let output = Command::new("taskset").args(["-a", "-c", "-p", &core.to_string(), &pid.to_string()]).output()?;
    ensure!(output.status.success(), "taskset: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Processor time that `pids` take while `time` passes, in per cent of one core.
pub(crate) async fn cpu_percent(pids: &[u32], time: Duration) -> anyhow::Result<f64> {
    let (before, since) = (cpu_seconds(pids)?, Instant::now());
    // Not a blocking sleep: a client that does not answer its server's pings is cut off.
    tokio::time::sleep(time).await;
    Ok((cpu_seconds(pids)? - before) / since.elapsed().as_secs_f64() * 100.0)
}

/// Processor time that `pids` took so far, user and system, in hundredths of a second.
pub(crate) fn cpu_seconds(pids: &[u32]) -> anyhow::Result<f64> {
    let ticks_per_s: f64 =
        String::from_utf8(Command::new("getconf").arg("CLK_TCK").output()?.stdout)?.trim().parse()?;
    let ticks = pids.iter().map(|&pid| cpu_ticks(pid)).sum::<anyhow::Result<u64>>()?;
    Ok(ticks as f64 / ticks_per_s)
}

/// User and system time of a process, see proc_pid_stat(5).
fn cpu_ticks(pid: u32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("process {pid} of the cluster ended"))?;
    // The name in parentheses may hold blanks; what follows it starts with field 3, and the times are fields 14 and 15.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).and_then(|f| f.parse::<u64>().ok()).context("no times in stat");
    Ok(field(14)? + field(15)?)
}
