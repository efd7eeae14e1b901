//! One child process: its announcements, and its exit.

use anyhow::{Context, anyhow};
use baton_node::announce::Announcement;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child as Process, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, timeout_at};

/// A running process of the cluster.
pub(super) struct Child {
    name: String,
    process: Process,
    pipe: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    http: Option<SocketAddr>,
}

impl Child {
    /// Starts `program`, from this program's folder or else from the PATH, without the environment variables `hidden` and with `added`.
    pub(super) fn spawn<'a>(
        name: &str,
        program: &str,
        flags: &[String],
        hidden: impl Iterator<Item = &'a str>,
        added: Option<(&str, &str)>,
    ) -> anyhow::Result<Self> {
        let beside = std::env::current_exe().ok().and_then(|me| Some(me.parent()?.join(program)));
        let path = beside.filter(|p| p.exists()).unwrap_or_else(|| PathBuf::from(program));
        let mut command = Command::new(&path);
        // Its own process group: Ctrl-C in the terminal signals only this process, which stops the others in order.
        command.args(flags).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        hidden.for_each(|variable| {
            command.env_remove(variable);
        });
        command.envs(added);
        let mut process = command.spawn().with_context(|| format!("cannot start {}", path.display()))?;
        let stdout = process.stdout.take().context("stdout is piped")?;
        let pipe = process.stdin.take();
        Ok(Self { name: name.into(), process, pipe, lines: BufReader::new(stdout).lines(), http: None })
    }

    /// The process's name in the cluster.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Address of its health and metrics, once it has announced it.
    pub(super) fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// The next announcement; an error once the process has exited.
    pub(super) async fn next(&mut self) -> anyhow::Result<Announcement> {
        let Some(line) = self.line().await? else { return Err(self.death().await) };
        let announcement = serde_json::from_str(&line).with_context(|| format!("{} announced {line:?}", self.name))?;
        if let Announcement::Listening { http, .. } = announcement {
            self.http = Some(http);
        }
        Ok(announcement)
    }

    /// Waits for a process that should not exit, and returns how it exited.
    pub(super) async fn ended(&mut self) -> anyhow::Error {
        while let Ok(Some(_)) = self.line().await {}
        self.death().await
    }

    /// The next line that is an announcement; `None` at the end. Other lines are printed: libraries print too, such as UCX its warnings.
    async fn line(&mut self) -> std::io::Result<Option<String>> {
        loop {
            match self.lines.next_line().await? {
                Some(line) if !line.starts_with('{') => eprintln!("{}: {line}", self.name),
                announced => return Ok(announced),
            }
        }
    }

    async fn death(&mut self) -> anyhow::Error {
        match self.process.wait().await {
            Ok(status) => anyhow!("{} ended ({status}); see its messages above", self.name),
            Err(error) => anyhow!("cannot wait for {}: {error}", self.name),
        }
    }

    /// Asks the process to stop.
    pub(super) fn close(&mut self) {
        self.pipe = None;
    }

    /// Waits for the exit; at the deadline it kills the process and returns `false`.
    pub(super) async fn join(&mut self, deadline: Instant) -> bool {
        if timeout_at(deadline, self.process.wait()).await.is_ok() {
            return true;
        }
        let _ = self.process.kill().await;
        false
    }
}
