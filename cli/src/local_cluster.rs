//! Clusters that this user's `baton up` runs. Each has its own folder with its authority and certificates while it runs.
//!
//! ```text
//! ~/.local/state/baton/up/PID/  lock         held by `baton up`; if it is free, the folder is left over and may be removed
//!                               authority/   router/   worker/   operator/
//!                               addresses    where the router listens: gRPC, and its cluster port
//! ```

use anyhow::Context;
use baton_node::environment::state_home;
use baton_node::identity::{Authority, Role};
use baton_node::private::{self, FileLock};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LOCK: &str = "lock";
const ADDRESSES: &str = "addresses";
/// Prefix of a folder that is not complete yet.
const NEW: &str = "new";
/// No start takes so long to give its folder its name.
const NEW_MAX: Duration = Duration::from_secs(60);
/// The certificates are never renewed, so they last longer than any `baton up` runs.
const LASTS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The folder of a running cluster. Dropping it removes it.
pub(crate) struct LocalCluster {
    folder: PathBuf,
    _lock: FileLock,
}

impl LocalCluster {
    /// Creates a folder with a new authority and a certificate for each role. Removes the folders of clusters that have ended.
    pub(crate) fn make() -> anyhow::Result<Self> {
        let all = all().context("there is no home folder to keep certificates in: set XDG_STATE_HOME")?;
        Self::make_in(&all).with_context(|| {
            format!(
                "cannot write certificates to {}: set XDG_STATE_HOME to a folder that can be written",
                all.display()
            )
        })
    }

    fn make_in(all: &Path) -> anyhow::Result<Self> {
        private::make_folder(all)?;
        clear(all);
        let folder = all.join(std::process::id().to_string());
        let new = folder.with_extension(NEW);
        remove(&new)?;
        private::make_folder(&new)?;
        let lock = FileLock::try_take(&new.join(LOCK))?.context("another process has the lock of a new folder")?;
        let authority = Authority::new()?;
        authority.save(&new.join("authority"))?;
        for role in Role::ALL {
            authority.issue(&new.join(role.name()), &[role], &[], LASTS, "")?;
        }
        std::fs::rename(&new, &folder)?;
        Ok(Self { folder, _lock: lock })
    }

    /// The identity folder for a process of this role.
    pub(crate) fn identity(&self, role: Role) -> PathBuf {
        self.folder.join(role.name())
    }

    /// Writes the router's addresses, so that commands of this user find the cluster.
    pub(crate) fn listens(&self, grpc: SocketAddr, cluster: SocketAddr) -> io::Result<()> {
        std::fs::write(self.folder.join(ADDRESSES), format!("{grpc} {cluster}\n"))
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        let _ = remove(&self.folder);
    }
}

/// The cluster port and the operator's files of the local cluster whose clients' address is `server`, if `baton up` runs it.
pub(crate) fn find(server: &str) -> Option<(String, PathBuf)> {
    find_in(&all()?, server)
}

fn find_in(all: &Path, server: &str) -> Option<(String, PathBuf)> {
    let bare = server.rsplit("://").next()?.trim_end_matches('/').replace("localhost:", "127.0.0.1:");
    let server: SocketAddr = bare.parse().ok()?;
    let here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified();
    for entry in std::fs::read_dir(all).ok()?.flatten() {
        let Ok(text) = std::fs::read_to_string(entry.path().join(ADDRESSES)) else { continue };
        let mut words = text.split_whitespace().map(str::parse::<SocketAddr>);
        let (Some(Ok(grpc)), Some(Ok(cluster))) = (words.next(), words.next()) else { continue };
        let same = grpc.ip() == server.ip() || (here(grpc.ip()) && here(server.ip()));
        if same && grpc.port() == server.port() && !is_free(&entry.path()) {
            return Some((cluster.to_string(), entry.path().join(Role::Operator.name())));
        }
    }
    None
}

fn all() -> Option<PathBuf> {
    state_home().map(|home| home.join("baton/up"))
}

/// Removes the folders of clusters that ended without removing them.
fn clear(all: &Path) {
    for entry in std::fs::read_dir(all).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_ours = match path.extension() {
            None => true,
            // A start takes the lock right after it made the folder.
            Some(ending) => ending == NEW && age(&path).is_some_and(|age| age > NEW_MAX),
        };
        if is_ours && is_free(&path) {
            let _ = remove(&path);
        }
    }
}

fn age(path: &Path) -> Option<Duration> {
    path.metadata().ok()?.modified().ok()?.elapsed().ok()
}

/// Whether no process holds the folder's lock.
fn is_free(folder: &Path) -> bool {
    matches!(FileLock::try_take_existing(&folder.join(LOCK)), Ok(Some(_)))
}

fn remove(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_running_cluster_is_found_and_one_that_was_killed_is_cleared_away() {
        let home = tempfile::tempdir().unwrap();
        let all = home.path().join("baton/up");
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let local_cluster = LocalCluster::make_in(&all).unwrap();
        assert_eq!(find_in(&all, "http://127.0.0.1:7001"), None);
        local_cluster.listens(address("127.0.0.1:7001"), address("127.0.0.1:7002")).unwrap();
        let operator = local_cluster.identity(Role::Operator);
        for server in ["http://127.0.0.1:7001", "localhost:7001", "http://127.0.0.1:7001/"] {
            assert_eq!(find_in(&all, server), Some(("127.0.0.1:7002".into(), operator.clone())), "{server}");
        }
        for other in ["http://127.0.0.1:7003", "http://10.0.0.1:7001", "router:7001"] {
            assert_eq!(find_in(&all, other), None, "{other}");
        }
        for (path, mode) in [("", 0o700), ("authority", 0o700), ("authority/ca.key", 0o600), ("worker/tls.key", 0o600)]
        {
            let found = std::fs::metadata(local_cluster.folder.join(path)).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{path}");
        }
        clear(&all);
        assert!(operator.exists(), "it runs");

        // Killed, one of them while it started: the lock is free, but the folder remains.
        let killed = [all.join("1"), all.join("2").with_extension(NEW)];
        for folder in &killed {
            std::fs::create_dir(folder).unwrap();
            std::fs::copy(local_cluster.folder.join(ADDRESSES), folder.join(ADDRESSES)).unwrap();
            std::fs::File::create(folder.join(LOCK)).unwrap();
        }
        clear(&all);
        assert!(!killed[0].exists() && killed[1].exists(), "the second may be starting");
        let begun = std::time::SystemTime::now() - 2 * NEW_MAX;
        std::fs::File::open(&killed[1]).unwrap().set_modified(begun).unwrap();
        clear(&all);
        assert!(killed.iter().all(|folder| !folder.exists()) && operator.exists());
        drop(local_cluster);
        assert!(!operator.exists());
    }
}
