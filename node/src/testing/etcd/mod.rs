//! Real etcd processes: each with its own data directory and ports, killed when dropped.

mod cluster;
mod growing;
mod space;

pub use cluster::EtcdCluster;
pub use growing::Growing;
pub use space::{fill, make_space};

use super::free_ports;
use crate::membership::etcd::EtcdConfig;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest wait for etcd to serve.
const START_MAX: Duration = Duration::from_secs(30);
const LOOPBACK: &str = "127.0.0.1";
/// Where `scripts/setup-etcd` unpacks etcd.
const UNPACKED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/etcd/usr/bin/etcd");

/// One etcd server, alone or one node of a cluster.
pub struct EtcdServer {
    name: String,
    /// All nodes of its cluster, `name=peer url`, separated by commas.
    nodes: String,
    process: Option<Child>,
    folder: TempDir,
    client: u16,
    peer: u16,
    health: u16,
    /// IP address that it listens on.
    host: String,
    flags: Vec<String>,
}

impl EtcdServer {
    /// Starts one and waits until it serves.
    pub fn start() -> io::Result<Self> {
        Self::start_with(&[])
    }

    /// The same with further flags.
    pub fn start_with(flags: &[&str]) -> io::Result<Self> {
        let flags = flags.iter().map(|f| (*f).to_owned()).collect();
        let mut server = Self::prepare("default".into(), LOOPBACK, flags)?;
        server.nodes = server.as_node();
        server.run()?;
        Ok(server)
    }

    /// Chooses a folder and ports.
    fn prepare(name: String, host: &str, flags: Vec<String>) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let [client, peer, health] = free_ports(host)?;
        let (nodes, host) = (String::new(), host.to_owned());
        Ok(Self { name, nodes, process: None, folder, client, peer, health, host, flags })
    }

    fn peer_url(&self) -> String {
        format!("http://{}:{}", self.host, self.peer)
    }

    /// Its entry in [`EtcdServer::nodes`].
    fn as_node(&self) -> String {
        format!("{}={}", self.name, self.peer_url())
    }

    /// Address of clients, `host:port`.
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.client)
    }

    /// Its URL, for the setting `membership.etcd.endpoints`.
    pub fn url(&self) -> String {
        let secure = self.flags.iter().any(|f| f.starts_with("--cert-file"));
        format!("{}://{}", if secure { "https" } else { "http" }, self.address())
    }

    /// Settings that reach it, with short waits.
    pub fn config(&self) -> EtcdConfig {
        quick(vec![self.url()])
    }

    /// Starts the process if it does not run, on the existing data, and waits until it serves.
    pub fn run(&mut self) -> io::Result<()> {
        self.spawn()?;
        self.wait_serving()
    }

    fn spawn(&mut self) -> io::Result<()> {
        let (client, peer) = (self.url(), self.peer_url());
        let log = std::fs::File::options().create(true).append(true).open(self.folder.path().join("log"))?;
        let mut command = Command::new(binary()?);
        command.arg(format!("--name={}", self.name)).arg(format!("--data-dir={}", self.data().display()));
        command.args([format!("--listen-client-urls={client}"), format!("--advertise-client-urls={client}")]);
        command.args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")]);
        command.args([format!("--initial-cluster={}", self.nodes), "--unsafe-no-fsync".into()]);
        command.arg(format!("--listen-metrics-urls=http://{}:{}", self.host, self.health));
        command.args(["--heartbeat-interval=50", "--election-timeout=500"]).args(&self.flags);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(command.spawn()?);
        Ok(())
    }

    fn wait_serving(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + START_MAX;
        while !self.serves() {
            let ended = self.process.as_mut().is_some_and(|p| matches!(p.try_wait(), Ok(Some(_))));
            if ended || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("etcd does not start:\n{log}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Whether its health endpoint reports health.
    fn serves(&self) -> bool {
        use std::io::{Read as _, Write as _};
        let ask = || -> io::Result<String> {
            let mut stream = std::net::TcpStream::connect((self.host.as_str(), self.health))?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer.contains(r#""health":"true""#))
    }

    /// Kills the process and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Sends `STOP` or `CONT`.
    pub fn signal(&self, signal: &str) -> io::Result<()> {
        let Some(process) = &self.process else { return Err(io::Error::other("etcd does not run")) };
        let status = Command::new("kill").args([&format!("-{signal}"), &process.id().to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill -{signal}: {status}"))) }
    }

    /// Removes all data; it must not run.
    pub fn wipe(&self) -> io::Result<()> {
        std::fs::remove_dir_all(self.data())
    }

    /// Copies its data aside, as a backup does; it must not run.
    pub fn back_up(&self) -> io::Result<()> {
        copy(&self.data(), &self.folder.path().join("backup"))
    }

    /// Puts the backup in place of the data; it must not run.
    pub fn restore(&self) -> io::Result<()> {
        self.wipe()?;
        copy(&self.folder.path().join("backup"), &self.data())
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The etcd on the PATH, else the one that `scripts/setup-etcd` unpacked.
fn binary() -> io::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("etcd")).find(|p| p.is_file());
    let found = found.or_else(|| Some(PathBuf::from(UNPACKED)).filter(|p| p.is_file()));
    found.ok_or_else(|| io::Error::other("no etcd: run `make clients` first, as `make test` does"))
}

/// Settings with short waits.
fn quick(endpoints: Vec<String>) -> EtcdConfig {
    EtcdConfig {
        endpoints,
        lease_ttl_s: 2,
        request_ms_max: 1_000,
        backoff_ms_max: 200,
        view_grace_ms: 3_000,
        probe_ms_max: 300,
        ..EtcdConfig::default()
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
