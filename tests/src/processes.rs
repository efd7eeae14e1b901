//! The product binaries as child processes: `baton up` on free ports, its output, and its child processes.

use crate::logs::bad_lines;
use anyhow::{Context, bail, ensure};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for a cluster to serve.
pub(crate) const START_MAX: Duration = Duration::from_secs(120);
/// Longest wait for a process to end after it was asked to.
pub const END_MAX: Duration = Duration::from_secs(60);
/// Interval of the checks of a wait.
pub(crate) const LOOK: Duration = Duration::from_millis(20);
/// The last line that `baton up` prints once it serves.
const SERVING: &str = "Ctrl-C stops everything.";

/// Path of a built binary; `make test` builds them all in the profile of the tests.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe()?;
    // target/<profile>/deps/<test> -> target/<profile>/<name>
    let path = me.parent().and_then(|deps| deps.parent()).context("the test runs from a target folder")?.join(name);
    ensure!(
        path.exists(),
        "{} is not built: run `cargo build --release --bins` first, as `make test` does",
        path.display()
    );
    Ok(path)
}

/// The checked-out commit, followed by `+changes` if there are any; empty without a commit.
pub fn commit() -> String {
    let changes = if git(&["status", "--porcelain", "--untracked-files=no"]).is_empty() { "" } else { "+changes" };
    match git(&["rev-parse", "--short", "HEAD"]) {
        head if head.is_empty() => head,
        head => head + changes,
    }
}

/// Tree hashes of these folders at the checked-out commit.
pub fn trees(folders: &[&str]) -> BTreeMap<String, String> {
    folders.iter().map(|folder| ((*folder).to_owned(), git(&["rev-parse", &format!("HEAD:{folder}")]))).collect()
}

/// Output of git; empty if it fails.
fn git(arguments: &[&str]) -> String {
    let said = Command::new("git").arg("-C").arg(env!("CARGO_MANIFEST_DIR")).args(arguments).output();
    let said = said.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    said.unwrap_or_default()
}

/// Runs `baton` with `arguments` to its end.
pub fn baton(arguments: &[&str]) -> anyhow::Result<Output> {
    baton_with(arguments, &[])
}

/// The same with further variables.
pub fn baton_with(arguments: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<Output> {
    let mut command = Command::new(binary("baton")?);
    Ok(command.args(arguments).envs(variables.iter().copied()).stdin(Stdio::null()).output()?)
}

/// Runs the Python client `tests/clients/{script}` to its end; an error shows all that it printed.
pub fn python_client(script: &str, arguments: &[&str]) -> anyhow::Result<String> {
    python_client_in("target/python", "make clients", script, arguments)
}

/// The same in `target/clients/{environment}`, which only `make test-full` makes.
pub fn further_client(environment: &str, script: &str, arguments: &[&str]) -> anyhow::Result<String> {
    python_client_in(&format!("target/clients/{environment}"), "make further-clients", script, arguments)
}

fn python_client_in(environment: &str, made_by: &str, script: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let python = here.join("..").join(environment).join("bin/python");
    ensure!(python.exists(), "{} is missing: run `{made_by}` first", python.display());
    let script = here.join("clients").join(script);
    let output = Command::new(python).arg(&script).args(arguments).stdin(Stdio::null()).output()?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{} failed ({}):\n{out}{err}", script.display(), output.status);
    Ok(out.into_owned())
}

/// Lines of a stream as they arrive; a thread reads them, so that the writer is never blocked.
#[derive(Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    pub(crate) fn of(stream: impl Read + Send + 'static) -> Self {
        Self::copied(stream, None)
    }

    /// The same with a copy in a file.
    pub(crate) fn copied(stream: impl Read + Send + 'static, mut copy: Option<File>) -> Self {
        let lines = Self::default();
        let written = lines.0.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if let Some(copy) = &mut copy {
                    // A full disk must not block the writer.
                    let _ = writeln!(copy, "{line}");
                }
                written.lock().push(line);
            }
        });
        lines
    }

    pub(crate) fn text(&self) -> String {
        self.0.lock().join("\n")
    }

    /// Whether the stream has ended: its thread has dropped its reference.
    fn ended(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

/// A running `baton up`. Dropping it kills it; tests check whether its children then end.
pub struct Up {
    process: Child,
    stdout: Lines,
    stderr: Lines,
}

impl Up {
    /// Starts `baton up` on free ports with more `flags` and waits until it serves.
    pub fn start(flags: &[&str]) -> anyhow::Result<Self> {
        Self::start_with(flags, &[])
    }

    /// The same with variables besides those of this process.
    pub fn start_with(flags: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let free = ["--grpc-port=0", "--http-port=0"];
        let flags: Vec<&str> = free.into_iter().chain(flags.iter().copied()).collect();
        let mut up = Self::spawn(&flags, variables)?;
        up.wait_serving()?;
        Ok(up)
    }

    /// Starts `baton up` with exactly these flags, and variables besides those of this process.
    pub fn spawn(flags: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        Self::spawn_as("up", flags, variables)
    }

    /// The same by another name of the command.
    pub fn spawn_as(name: &str, flags: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let mut command = Command::new(binary("baton")?);
        command.arg(name).args(flags).envs(variables.iter().copied());
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let stdout = Lines::of(process.stdout.take().context("stdout is piped")?);
        let stderr = Lines::of(process.stderr.take().context("stderr is piped")?);
        Ok(Self { process, stdout, stderr })
    }

    /// Waits until it serves.
    pub fn wait_serving(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_MAX;
        while !self.stdout().contains(SERVING) {
            if let Some(status) = self.process.try_wait()? {
                bail!("`baton up` ended ({status}):\n{}", self.stderr());
            }
            ensure!(Instant::now() < deadline, "`baton up` does not serve after {START_MAX:?}:\n{}", self.stderr());
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Its stdout so far.
    pub fn stdout(&self) -> String {
        self.stdout.text()
    }

    /// The stderr of it and its children so far.
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// gRPC address of the router, `host:port`, as printed.
    pub fn grpc(&self) -> anyhow::Result<String> {
        self.printed("gRPC")
    }

    /// Base address of the OpenAI API, as printed.
    pub fn openai(&self) -> anyhow::Result<String> {
        self.printed("HTTP")
    }

    /// The same for clients of Anthropic's API, which add the version themselves.
    pub fn anthropic(&self) -> anyhow::Result<String> {
        let openai = self.openai()?;
        Ok(openai.trim_end_matches("/v1").to_owned())
    }

    /// Address of the metrics of `router`, `decode-0` and so on, as printed.
    pub fn metrics(&self, process: &str) -> anyhow::Result<String> {
        let suffix = format!(" {process}");
        let text = self.stdout();
        let line = text.lines().find(|l| l.contains("/metrics") && l.ends_with(&suffix));
        let url = line.and_then(|l| l.split_whitespace().find(|w| w.starts_with("http://")));
        url.map(str::to_owned).with_context(|| format!("no metrics of {process} in:\n{text}"))
    }

    /// The router's cluster port, and the folder of the operator's certificate, as printed.
    pub fn cluster(&self) -> anyhow::Result<(SocketAddr, PathBuf)> {
        let text = self.stdout();
        let line = text.lines().find(|l| l.trim().starts_with("cluster ")).context("no cluster port")?;
        let folder = line.split_whitespace().next_back().context("no folder")?;
        Ok((self.printed("cluster")?.parse()?, folder.into()))
    }

    fn printed(&self, label: &str) -> anyhow::Result<String> {
        let text = self.stdout();
        let line = text.lines().find_map(|l| l.trim().strip_prefix(label));
        let word = line.and_then(|l| l.split_whitespace().next());
        word.map(str::to_owned).with_context(|| format!("no {label} address in:\n{text}"))
    }

    /// Its own process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Process ids of its running children.
    pub fn children(&self) -> anyhow::Result<Vec<u32>> {
        let me = self.pid();
        Ok(processes()?.into_iter().filter(|p| p.parent == me && p.runs).map(|p| p.pid).collect())
    }

    /// Process id of the child that has this word among its arguments.
    pub fn child(&self, word: &str) -> anyhow::Result<u32> {
        for pid in self.children()? {
            let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if arguments.split('\0').any(|a| a.contains(word)) {
                return Ok(pid);
            }
        }
        bail!("no child was started with {word}")
    }

    /// Sends `signal` (`INT`, `TERM`, `KILL`) only to this process.
    pub fn signal(&self, signal: &str) -> anyhow::Result<()> {
        send(signal, self.pid())
    }

    /// Waits for its end, and for the end of its output, which its children share.
    pub fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + END_MAX;
        loop {
            if let Some(status) = self.process.try_wait()?
                && self.stdout.ended()
                && self.stderr.ended()
            {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "`baton up` runs on after {END_MAX:?}:\n{}", self.stderr());
            std::thread::sleep(LOOK);
        }
    }

    /// Fails if a process logged an error, or panicked.
    pub fn no_errors(&self) -> anyhow::Result<()> {
        let text = self.stderr();
        let bad: Vec<&str> = bad_lines(&text).collect();
        ensure!(bad.is_empty(), "unexpected errors in the logs:\n{}", bad.join("\n"));
        Ok(())
    }

    /// Stops it as Ctrl-C does, and checks that it exits successfully, leaves no child and logged no error.
    pub fn stop(mut self) -> anyhow::Result<()> {
        let children = self.children()?;
        self.signal("INT")?;
        let status = self.wait()?;
        ensure!(status.success(), "`baton up` ended with {status}:\n{}", self.stderr());
        wait_gone(&children)?;
        self.no_errors()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends `signal` to a process.
pub fn send(signal: &str, pid: u32) -> anyhow::Result<()> {
    let status = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status()?;
    ensure!(status.success(), "kill -{signal} {pid}: {status}");
    Ok(())
}

/// Waits until none of these processes runs.
pub fn wait_gone(pids: &[u32]) -> anyhow::Result<()> {
    let deadline = Instant::now() + END_MAX;
    loop {
        let left: Vec<u32> =
            processes()?.into_iter().filter(|p| p.runs && pids.contains(&p.pid)).map(|p| p.pid).collect();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "processes {left:?} run on after {END_MAX:?}");
        std::thread::sleep(LOOK);
    }
}

struct Process {
    pid: u32,
    parent: u32,
    /// Not a zombie, whose parent has merely not read its exit status yet.
    runs: bool,
}

/// All processes of this machine, from `/proc/PID/stat`: `pid (name) state parent ...`.
fn processes() -> anyhow::Result<Vec<Process>> {
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
        // It may end while this reads.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
        let (state, parent) = (fields.next()?, fields.next()?.parse().ok()?);
        Some(Process { pid, parent, runs: state != "Z" && state != "X" })
    };
    Ok(std::fs::read_dir("/proc")?.filter_map(read).collect())
}

/// Resources that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Open file descriptors.
    pub fds: usize,
    pub threads: usize,
    /// Resident memory.
    pub rss_kib: usize,
}

impl Resources {
    /// The resources that process `pid` holds now.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let number = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key)).and_then(|l| l.split_whitespace().next());
            line.and_then(|n| n.parse::<usize>().ok()).with_context(|| format!("no {key} of process {pid}"))
        };
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        Ok(Self { fds, threads: number("Threads:")?, rss_kib: number("VmRSS:")? })
    }
}

/// Name of a process, as truncated by the kernel.
pub fn name_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Addresses at which a process listens over TCP and IPv4, from `/proc`: its open sockets in the state LISTEN.
pub fn listening(pid: u32) -> anyhow::Result<Vec<SocketAddr>> {
    let open = |entry: std::io::Result<std::fs::DirEntry>| {
        let link = std::fs::read_link(entry.ok()?.path()).ok()?;
        Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))?.filter_map(open).collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp"))?;
    let listens = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let (ip, port) = local.split_once(':')?;
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_le_bytes());
        let is_its = *state == "0A" && sockets.iter().any(|socket| socket == inode);
        is_its.then_some(SocketAddr::from((ip, u16::from_str_radix(port, 16).ok()?)))
    };
    Ok(table.lines().filter_map(listens).collect())
}
