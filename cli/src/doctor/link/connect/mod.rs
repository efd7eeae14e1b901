//! `baton doctor --connect`: measures the connection to a host where a doctor listens.

use super::protocol::{Answer, Ask, Line, now_us};
use super::trouble::{Trouble, remedy};
use super::{Way, kv, listen};
use crate::doctor::finding::{Finding, Verdict};
use crate::doctor::{rate, rdma, ucx};
use anyhow::{Context, bail};
use baton_kv_transfer::Moved;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest time for all handoffs: at 20 MB/s they take 40 s.
const TRANSFER_MAX: Duration = Duration::from_secs(120);
/// Clock queries; the one with the shortest round trip counts.
const CLOCK_ROUNDS: usize = 9;
/// Handoffs that are measured.
const ROUNDS: usize = 5;
/// From about this skew on, spans of one request on two hosts appear out of order. Leases and deadlines are durations, so skew does not
/// affect them.
const SKEW_MAX: Duration = Duration::from_millis(10);
/// Share of the device's rate below which there is probably a bottleneck.
const RATE_SHARE_MIN: f64 = 0.5;

/// Connects to `to`, `host:port`, and measures. Failures are reported as findings.
pub(crate) async fn connect(to: &str, way: &Way) -> Vec<Finding> {
    let began = Instant::now();
    let connected = timeout(CONNECT_MAX, TcpStream::connect(to)).await;
    let line = match connected.map_err(anyhow::Error::from).and_then(|stream| Ok(Line::new(stream?)?)) {
        Ok(line) => line,
        Err(error) => {
            let remedy = "start `baton doctor --listen 0.0.0.0:PORT` there, and let this port through firewalls and network policies";
            return vec![Finding::new("reach", Verdict::Failure, format!("{to}: {error}"), remedy)];
        }
    };
    let mut findings = vec![Finding::ok("reach", format!("{to} in {:.2} ms", began.elapsed().as_secs_f64() * 1e3))];
    findings.extend(measure(line, way).await);
    findings
}

async fn measure(mut line: Line, way: &Way) -> Vec<Finding> {
    let clock = match clock(&mut line).await {
        Ok((behind_us, round_trip)) => skew(behind_us, round_trip),
        Err(error) => Finding::new("clock", Verdict::Failure, format!("{error:#}"), remedy(&error, false)),
    };
    let late = |_| Err(Trouble::Late(TRANSFER_MAX).into());
    let root = Path::new("/");
    let moved = match timeout(TRANSFER_MAX, transfer(&mut line, way)).await.unwrap_or_else(late) {
        Ok(moved) => judge(root, &moved, way.rdma),
        Err(error) => {
            let over_rdma = rdma::is_among(root, &way.devices);
            Finding::new("kv transfer", Verdict::Failure, format!("{error:#}"), remedy(&error, over_rdma))
        }
    };
    vec![clock, moved]
}

/// By how many microseconds the other clock is ahead, and the round trip in which it was read.
async fn clock(line: &mut Line) -> anyhow::Result<(i64, Duration)> {
    let mut best: Option<(i64, Duration)> = None;
    for _ in 0..CLOCK_ROUNDS {
        let (asked_us, asked) = (now_us(), Instant::now());
        let Answer::Clock { at_us } = line.ask(&Ask::Clock).await? else {
            bail!("the other side sent an unexpected answer")
        };
        let took = asked.elapsed();
        // Assumes that the clock was read half way.
        let ahead = at_us as i64 - (asked_us as i64 + took.as_micros() as i64 / 2);
        if best.is_none_or(|(_, least)| took < least) {
            best = Some((ahead, took));
        }
    }
    best.context("the clock was never measured")
}

fn skew(ahead_us: i64, round_trip: Duration) -> Finding {
    let error_us = round_trip.as_micros() as u64 / 2;
    let found = format!(
        "the other clock is {:+.2} ms from this one, within {:.2} ms",
        ahead_us as f64 / 1e3,
        error_us as f64 / 1e3
    );
    if ahead_us.unsigned_abs() <= SKEW_MAX.as_micros() as u64 + error_us {
        return Finding::ok("clock", found);
    }
    let remedy =
        "traces of several hosts will look out of order: keep both hosts' time with NTP or PTP (chronyc tracking)";
    Finding::new("clock", Verdict::Warning, found, remedy)
}

/// Runs handoffs to the other side.
async fn transfer(line: &mut Line, way: &Way) -> anyhow::Result<Vec<Moved>> {
    let bind = line.socket().local_addr()?.ip().to_canonical();
    let ask = Ask::Sink { tls: way.tls.clone(), blocks: kv::BLOCKS };
    let Answer::Sink { address } = line.ask(&ask).await? else { bail!("the other side sent an unexpected answer") };
    let address = kv::from_text(&address)?;
    let tls = way.tls.clone();
    let devices = way.devices.given().map(str::to_owned);
    let moved = spawn_blocking(move || {
        let trial = kv::start("doctor-connects", bind, tls, devices, kv::BLOCKS)?;
        kv::rounds(trial, listen::NAME, address, ROUNDS)
    });
    moved.await?
}

/// Rates the best of the rounds: other load can only reduce a rate.
fn judge(root: &Path, moved: &[Moved], wants_rdma: bool) -> Finding {
    let of = |m: &Moved| m.report.bytes as f64 / m.took.as_secs_f64();
    let Some(best) = moved.iter().max_by(|a, b| of(a).total_cmp(&of(b))) else {
        return Finding::new("kv transfer", Verdict::Failure, "nothing was moved", "try again");
    };
    let (rate, report) = (of(best), &best.report);
    let mib = report.bytes >> 20;
    let found = format!(
        "{:.2} GB/s: {}, {mib} MiB, verified {:.1} ms after the offer, by {} over {}",
        rate / 1e9,
        kv::WHAT,
        best.took.as_secs_f64() * 1e3,
        report.transport,
        report.lanes
    );
    let is_rdma = report.lanes.split(',').any(ucx::is_rdma);
    if wants_rdma && !is_rdma {
        let remedy = "no lane of this is RDMA's: name them and the ports, here with --ucx-tls rc --ucx-net-devices, on the other host with \
                      --ucx-net-devices (workers: transfer.ucx_tls, ucx_net_devices)";
        return Finding::new("kv transfer", Verdict::Failure, found, remedy);
    }
    match rate::of_lanes(root, &report.lanes) {
        Some((name, Some(most))) => {
            let found = format!("{found}; {:.0}% of {name}'s {:.2} GB/s", 100.0 * rate / most, most / 1e9);
            if rate >= RATE_SHARE_MIN * most {
                return Finding::ok("kv transfer", found);
            }
            let remedy = if is_rdma {
                "less than half of what the port can: look at the NIC's slot (lanes of PCIe, NUMA node), at congestion (RoCE: PFC, ECN), and \
                 at what else both hosts do; `ib_write_bw` shows what it does without Baton"
            } else {
                "less than half of what the device can: RDMA lanes where both hosts have some (transfer.ucx_tls, ucx_net_devices), jumbo \
                 frames, or more of the processor for TCP"
            };
            Finding::new("kv transfer", Verdict::Warning, found, remedy)
        }
        Some((name, None)) => Finding::ok("kv transfer", format!("{found}; {name} tells no rate")),
        None => Finding::ok("kv transfer", found),
    }
}

#[cfg(test)]
mod tests;
