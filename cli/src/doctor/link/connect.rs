//! `baton doctor --connect`: measures the way to a host where a doctor listens.

use super::protocol::{Answer, Ask, Line, now_us};
use super::{kv, listen};
use crate::doctor::devices;
use crate::doctor::finding::{Finding, Verdict};
use anyhow::{Context, anyhow, bail};
use baton_kv_transfer::{Moved, inventory};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest time for all handoffs: at 20 MB/s they take 40 s.
const TRANSFER_MAX: Duration = Duration::from_secs(120);
/// Questions for the time; the one that was answered soonest counts.
const CLOCK_ROUNDS: usize = 9;
/// Handoffs that count.
const ROUNDS: usize = 5;
/// Spans of one request on two hosts are out of order from about here on; leases and deadlines are durations and do not mind.
const SKEW_MAX: Duration = Duration::from_millis(10);
/// Share of the device's rate below which something is in the way.
const RATE_SHARE_MIN: f64 = 0.5;

/// Connects to `to`, `host:port`, and measures. Failures are findings too.
pub(crate) async fn connect(to: &str, tls: &str) -> Vec<Finding> {
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
    findings.extend(measure(line, tls).await);
    findings
}

async fn measure(mut line: Line, tls: &str) -> Vec<Finding> {
    let clock = match clock(&mut line).await {
        Ok((behind_us, round_trip)) => skew(behind_us, round_trip),
        Err(error) => {
            Finding::new("clock", Verdict::Failure, format!("{error:#}"), "run the same version of baton on both hosts")
        }
    };
    let late = |_| Err(anyhow!("not done within {TRANSFER_MAX:?}"));
    let rate = match timeout(TRANSFER_MAX, transfer(&mut line, tls)).await.unwrap_or_else(late) {
        Ok((moved, device)) => rate(&moved, device),
        Err(error) => {
            let remedy = "workers choose ports themselves: let all TCP ports between them through, and look at UCX_NET_DEVICES on both hosts";
            Finding::new("kv transfer", Verdict::Failure, format!("{error:#}"), remedy)
        }
    };
    vec![clock, rate]
}

/// By how many microseconds the other clock is ahead, and the round trip that it was seen in.
async fn clock(line: &mut Line) -> anyhow::Result<(i64, Duration)> {
    let mut best: Option<(i64, Duration)> = None;
    for _ in 0..CLOCK_ROUNDS {
        let (asked_us, asked) = (now_us(), Instant::now());
        let Answer::Clock { at_us } = line.ask(&Ask::Clock).await? else {
            bail!("the other side answers something else")
        };
        let took = asked.elapsed();
        // Taken to be read half way.
        let ahead = at_us as i64 - (asked_us as i64 + took.as_micros() as i64 / 2);
        if best.is_none_or(|(_, least)| took < least) {
            best = Some((ahead, took));
        }
    }
    best.context("no question was asked")
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

/// Handoffs to the other side, and the rate of the device that they left by, in bytes a second.
async fn transfer(line: &mut Line, tls: &str) -> anyhow::Result<(Vec<Moved>, Option<(String, Option<f64>)>)> {
    let bind = line.socket().local_addr()?.ip().to_canonical();
    let ask = Ask::Sink { tls: tls.to_owned(), blocks: kv::BLOCKS };
    let Answer::Sink { address } = line.ask(&ask).await? else { bail!("the other side answers something else") };
    let (address, tls) = (kv::from_text(&address)?, tls.to_owned());
    let moved = spawn_blocking(move || {
        let trial = kv::start("doctor-connects", bind, &tls, kv::BLOCKS)?;
        kv::rounds(trial, listen::NAME, address, ROUNDS)
    });
    let devices = inventory::host_addresses().unwrap_or_default();
    Ok((moved.await??, devices::of_address(Path::new("/"), bind, &devices)))
}

/// The best of the rounds: whatever else runs can only take away from a rate.
fn rate(moved: &[Moved], device: Option<(String, Option<f64>)>) -> Finding {
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
    match device {
        Some((name, Some(most))) => {
            let found = format!("{found}; {:.0}% of {name}'s {:.2} GB/s", 100.0 * rate / most, most / 1e9);
            if rate >= RATE_SHARE_MIN * most {
                return Finding::ok("kv transfer", found);
            }
            let remedy = "less than half of what the device can: RDMA lanes (transfer.ucx_tls, ucx_net_devices), jumbo frames, or more of the processor for \
                          TCP";
            Finding::new("kv transfer", Verdict::Warning, found, remedy)
        }
        Some((name, None)) => Finding::ok("kv transfer", format!("{found}; {name} tells no rate")),
        None => Finding::ok("kv transfer", found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn a_clock_that_is_off_is_told_beyond_the_error_of_its_measure() {
        let ms = Duration::from_millis;
        assert_eq!(skew(9_000, ms(1)).verdict, Verdict::Ok);
        assert_eq!(skew(-30_000, ms(1)).verdict, Verdict::Warning);
        assert_eq!(skew(30_000, ms(50)).verdict, Verdict::Ok);
        assert!(skew(-30_000, ms(1)).found.contains("-30.00 ms"));
    }

    #[tokio::test]
    async fn two_doctors_move_kv() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let serves =
            tokio::spawn(async move { listen::serve(Line::new(listener.accept().await.unwrap().0).unwrap()).await });
        let findings = connect(&to, "tcp").await;
        serves.await.unwrap().unwrap();
        let checks: Vec<_> = findings.iter().map(|f| (f.check.as_str(), f.verdict)).collect();
        assert_eq!(
            checks,
            [("reach", Verdict::Ok), ("clock", Verdict::Ok), ("kv transfer", Verdict::Ok)],
            "{findings:?}"
        );
        assert!(findings[2].found.contains("128 MiB") && findings[2].found.contains("tcp"), "{findings:?}");
    }

    #[tokio::test]
    async fn a_port_that_is_closed_and_one_that_is_another_s_are_told() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let other = tokio::spawn(async move { drop(listener.accept().await) });
        let findings = connect(&to, "tcp").await;
        other.await.unwrap();
        assert_eq!(
            findings.iter().map(|f| f.verdict).collect::<Vec<_>>(),
            [Verdict::Ok, Verdict::Failure, Verdict::Failure]
        );
        let findings = connect(&to, "tcp").await;
        assert_eq!((findings.len(), findings[0].verdict), (1, Verdict::Failure));
    }

    #[tokio::test]
    async fn what_the_other_side_cannot_do_is_told_in_its_words() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let serves =
            tokio::spawn(async move { listen::serve(Line::new(listener.accept().await.unwrap().0).unwrap()).await });
        let findings = connect(&to, "carrier_pigeon").await;
        serves.await.unwrap().unwrap();
        assert_eq!(findings[2].verdict, Verdict::Failure);
        assert!(findings[2].found.starts_with("the other side says: "), "{findings:?}");
    }
}
