//! Other engines on the same work, where `make bench-peers` installed them: `tests/peers/peer.py`, one process for each.

use crate::THREADS;
use anyhow::{Context, bail};
use baton_tests::work::Work;
use serde::Deserialize;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Longest wait for an answer: a measurement begins by computing the prompts of its sequences.
const ANSWER_MAX: Duration = Duration::from_secs(600);

/// What a process says.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Name(String),
    Missing(String),
    Seconds(f64),
    Clients(Times),
}

/// Requests that come at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clients {
    pub(crate) count: usize,
    /// Tokens with which all prompts begin, and what they are made from.
    pub(crate) shared: usize,
    pub(crate) prefix: usize,
    /// Tokens with which each prompt goes on, and what those of the first are made from; the others follow.
    pub(crate) own: usize,
    pub(crate) salt: usize,
    /// Tokens of an answer.
    pub(crate) length: usize,
}

impl Clients {
    /// The prompt of one of them, as `peer.py` makes it.
    pub(crate) fn prompt(&self, client: usize) -> Vec<u32> {
        let tokens = |count: usize, salt: usize| (0..count).map(move |i| (100 + (i + 7 * salt) * 7919 % 48_000) as u32);
        tokens(self.shared, self.prefix).chain(tokens(self.own, self.salt + client)).collect()
    }
}

/// Seconds to the first token of each client, and to the last of all.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Times {
    pub(crate) first: Vec<f64>,
    pub(crate) wall: f64,
}

/// An engine on a model file.
pub(crate) struct Peer {
    /// For names of figures.
    pub(crate) key: String,
    /// Its version, and the instructions that it says it uses.
    pub(crate) name: String,
    child: Child,
    to: ChildStdin,
    answers: Receiver<String>,
}

impl Peer {
    fn start(engine: &str, weights: &str, model: &Path) -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(installed().join("bin/python"));
        command.arg(root.join("peers/peer.py")).arg(engine).arg(model).arg(THREADS.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (to, from) = (to.context("stdin is piped")?, from.context("stdout is piped")?);
        let (sender, answers) = sync_channel(1);
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let key = format!("{}_{weights}", engine.replace('.', "_"));
        let mut peer = Self { key, name: String::new(), child, to, answers };
        match peer.answer()? {
            Answer::Name(name) => peer.name = format!("{name}, {weights}"),
            Answer::Missing(why) => bail!("{why}"),
            other => bail!("it said {other:?} of itself"),
        }
        Ok(peer)
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        let line = self.answers.recv_timeout(ANSWER_MAX).with_context(|| format!("{} does not answer", self.key))?;
        serde_json::from_str(&line).with_context(|| format!("{} said {line:?}", self.key))
    }

    fn say(&mut self, line: &str) -> anyhow::Result<f64> {
        match self.ask(line)? {
            Answer::Seconds(seconds) => Ok(seconds),
            other => bail!("{} said {other:?} to {line:?}", self.key),
        }
    }

    fn ask(&mut self, line: &str) -> anyhow::Result<Answer> {
        writeln!(self.to, "{line}")?;
        self.answer()
    }

    /// Requests at once.
    pub(crate) fn clients(&mut self, work: &Clients) -> anyhow::Result<Times> {
        let Clients { count, shared, prefix, own, salt, length } = *work;
        match self.ask(&format!("clients {count} {shared} {prefix} {own} {salt} {length}"))? {
            Answer::Clients(times) if times.first.len() == count => Ok(times),
            other => bail!("{} said {other:?} to {work:?}", self.key),
        }
    }

    /// Seconds of a prompt or a step.
    pub(crate) fn measure(&mut self, work: Work) -> anyhow::Result<f64> {
        self.say(&match work {
            Work::Prefill(tokens) => format!("prefill {tokens}"),
            Work::Decode(sequences, context) => format!("decode {sequences} {context}"),
        })
    }

    /// Gives back what sequences hold.
    pub(crate) fn release(&mut self) -> anyhow::Result<()> {
        self.say("release").map(drop)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn installed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers")
}

/// The engines that are installed, each on the model's file and on the same weights in F16.
pub(crate) fn all(model: &Path) -> anyhow::Result<Vec<Peer>> {
    some(model, &[("llama.cpp", "q4_1"), ("llama.cpp", "f16"), ("openvino", "q4_1"), ("openvino", "f16")])
}

/// These engines on these weights, where they are installed. Those that do not run are named.
pub(crate) fn some(model: &Path, wanted: &[(&str, &str)]) -> anyhow::Result<Vec<Peer>> {
    let folder = installed();
    if !folder.join(".installed").exists() {
        eprintln!("  no peers: `make bench-peers` installs them");
        return Ok(Vec::new());
    }
    let wide = folder.join("f16.gguf");
    if !wide.exists() {
        let expand = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/expand.py");
        let status = Command::new(folder.join("bin/python")).arg(expand).arg(model).arg(&wide).status()?;
        anyhow::ensure!(status.success(), "cannot write {}", wide.display());
    }
    let mut peers = Vec::new();
    for (engine, weights) in wanted {
        let file = if *weights == "f16" { &wide } else { model };
        match Peer::start(engine, weights, file) {
            Ok(peer) => {
                eprintln!("  {}: {}", peer.key, peer.name);
                peers.push(peer);
            }
            Err(error) => eprintln!("  {engine} on {weights} is left out: {error:#}"),
        }
    }
    Ok(peers)
}
