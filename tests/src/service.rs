//! One service of a cluster as a separate process, started, ended and restarted as by a supervisor.

use crate::logs::bad_lines;
use crate::processes::{END_MAX, LOOK, Lines, START_MAX, binary, send};
use anyhow::{Context, bail, ensure};
use baton_node::announce::Announcement;
use baton_node::testing::free_ports;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// Loopback addresses for services that must keep their address after a restart.
pub fn free_addresses<const N: usize>() -> io::Result<[SocketAddr; N]> {
    Ok(free_ports("127.0.0.1")?.map(|port| (Ipv4Addr::LOCALHOST, port).into()))
}

/// Where a service runs, and where its log is written.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Command line that runs another program in its own process, such as `ip netns exec NAME`; empty for none.
    pub within: Vec<String>,
    /// A file to which its stderr is also written.
    pub log: Option<PathBuf>,
}

/// A running service. Dropping it kills it.
pub struct Service {
    program: String,
    start: Start,
    process: Child,
    stdout: Lines,
    stderr: Lines,
}

/// Builds the command of each start.
#[derive(Clone)]
struct Start {
    command: Arc<dyn Fn() -> Command + Send + Sync>,
    log: Option<PathBuf>,
}

impl Service {
    /// Starts `program` with these flags and `--announce`.
    pub fn start(program: &str, flags: &[String]) -> anyhow::Result<Self> {
        Self::start_in(Place::default(), program, flags)
    }

    /// The same in this place.
    pub fn start_in(Place { within, log }: Place, program: &str, flags: &[String]) -> anyhow::Result<Self> {
        let words: Vec<OsString> = within.iter().map(OsString::from).chain([binary(program)?.into()]).collect();
        let flags = flags.to_vec();
        let command = move || {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).arg("--announce").args(&flags);
            command
        };
        Self::spawn(program, Start { command: Arc::new(command), log })
    }

    /// Starts the result of `command`, which must announce itself like a service; `program` is its name in messages.
    pub fn launch(program: &str, command: impl Fn() -> Command + Send + Sync + 'static) -> anyhow::Result<Self> {
        Self::spawn(program, Start { command: Arc::new(command), log: None })
    }

    fn spawn(program: &str, start: Start) -> anyhow::Result<Self> {
        let mut command = (start.command)();
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let log = start.log.as_ref().map(|path| File::options().create(true).append(true).open(path)).transpose()?;
        let stdout = Lines::of(process.stdout.take().context("stdout is piped")?);
        let stderr = Lines::copied(process.stderr.take().context("stderr is piped")?, log);
        Ok(Self { program: program.into(), start, process, stdout, stderr })
    }

    /// Starts the same command again, after the former start has ended.
    pub fn again(&self) -> anyhow::Result<Self> {
        Self::spawn(&self.program, self.start.clone())
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends `signal` (`TERM`, `STOP`, `KILL`).
    pub fn signal(&self, signal: &str) -> anyhow::Result<()> {
        send(signal, self.pid())
    }

    /// Its stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    fn announced(&self) -> Vec<Announcement> {
        self.stdout.text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Its gRPC and HTTP addresses.
    pub async fn listening(&mut self) -> anyhow::Result<(SocketAddr, SocketAddr)> {
        let addresses = |announced: Vec<Announcement>| {
            announced.into_iter().find_map(|a| match a {
                Announcement::Listening { grpc, http, .. } => Some((grpc, http)),
                _ => None,
            })
        };
        self.wait_announced(addresses).await
    }

    /// Address of a router for workers and operators.
    pub async fn cluster(&mut self) -> anyhow::Result<SocketAddr> {
        let addresses = |announced: Vec<Announcement>| {
            announced.into_iter().find_map(|a| match a {
                Announcement::Listening { cluster, .. } => cluster,
                _ => None,
            })
        };
        self.wait_announced(addresses).await
    }

    /// Address of its metrics.
    pub async fn metrics(&mut self) -> anyhow::Result<String> {
        Ok(format!("http://{}/metrics", self.listening().await?.1))
    }

    /// Waits until it is ready to serve.
    pub async fn ready(&mut self) -> anyhow::Result<()> {
        self.wait_announced(|announced| announced.contains(&Announcement::Ready).then_some(())).await
    }

    async fn wait_announced<T>(&mut self, found: impl Fn(Vec<Announcement>) -> Option<T>) -> anyhow::Result<T> {
        let deadline = Instant::now() + START_MAX;
        loop {
            if let Some(found) = found(self.announced()) {
                return Ok(found);
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("{} ended ({status}):\n{}", self.program, self.stderr());
            }
            ensure!(Instant::now() < deadline, "{} does not start in {START_MAX:?}:\n{}", self.program, self.stderr());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + END_MAX;
        loop {
            if let Some(status) = self.process.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "{} runs on after {END_MAX:?}:\n{}", self.program, self.stderr());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Ends it with SIGTERM, and checks that it exits successfully and logged no error.
    pub async fn terminate(&mut self) -> anyhow::Result<()> {
        self.signal("TERM")?;
        let status = self.ended().await?;
        let text = self.stderr();
        ensure!(status.success(), "{} ended with {status}:\n{text}", self.program);
        let bad: Vec<&str> = bad_lines(&text).collect();
        ensure!(bad.is_empty(), "unexpected errors in the logs of {}:\n{}", self.program, bad.join("\n"));
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
