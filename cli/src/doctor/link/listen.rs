//! `baton doctor --listen`: answers doctors of other hosts, one at a time.

use super::kv;
use super::protocol::{Answer, Ask, Line, now_us};
use anyhow::{Context, ensure};
use baton_kv_transfer::Trial;
use std::net::SocketAddr;
use std::pin::pin;
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;

/// Name of the listening side's service.
pub(super) const NAME: &str = "doctor-listens";

/// Answers until it is interrupted, over `devices` if they are named. Prints its address on standard output.
pub(crate) async fn listen(address: SocketAddr, devices: Option<String>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let at = listener.local_addr()?;
    // The other host cannot connect to an unspecified address.
    let to = if at.ip().is_unspecified() { format!("HOST:{}", at.port()) } else { at.to_string() };
    println!("listens on {at}; on the other host: baton doctor --connect {to}");
    // One for all iterations: a signal between two of them would otherwise be lost.
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    loop {
        let served = async {
            let (stream, from) = listener.accept().await?;
            println!("{from} asks");
            serve(Line::new(stream)?, devices.clone()).await
        };
        tokio::select! {
            // A doctor whose connection breaks must not end the service for the others.
            served = served => if let Err(error) = served { println!("the measurement failed: {error:#}") },
            _ = &mut interrupted => return Ok(()),
        }
    }
}

/// Answers one doctor until it disconnects.
pub(super) async fn serve(mut line: Line, devices: Option<String>) -> anyhow::Result<()> {
    let mut sink = None;
    while let Some(ask) = line.hear().await? {
        let answer = match ask {
            Ask::Clock => Answer::Clock { at_us: now_us() },
            Ask::Sink { tls, blocks } => match start(&line, tls, devices.clone(), blocks).await {
                Ok(trial) => Answer::Sink { address: kv::to_text(&sink.insert(trial).address()) },
                Err(error) => Answer::Refused { why: format!("{error:#}") },
            },
        };
        line.say(&answer).await?;
    }
    if let Some(sink) = sink {
        spawn_blocking(|| sink.stop()).await?;
    }
    Ok(())
}

/// A service at the address that the other side connected to, or on the devices that this side names: the other side may not choose where
/// this host listens.
async fn start(line: &Line, tls: Option<String>, devices: Option<String>, blocks: u32) -> anyhow::Result<Trial> {
    ensure!((2..=kv::BLOCKS_MAX).contains(&blocks), "a pool has 2 to {} blocks", kv::BLOCKS_MAX);
    let bind = line.socket().local_addr()?.ip().to_canonical();
    spawn_blocking(move || kv::start(NAME, bind, tls, devices, blocks)).await?
}
