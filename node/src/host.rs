//! Resources that this host offers a process, and raising their limits.

use std::net::{IpAddr, UdpSocket};
use std::path::Path;

/// Memory that this process may use, in bytes: the host's, or less if a control group limits it. `None` if the host
/// does not report it.
pub fn memory_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
    bound(&read("/proc/meminfo"), &read("/sys/fs/cgroup/memory.max"))
}

/// The address from which this host reaches others. `any` is the unspecified address of IPv4 or IPv6. `None` if the host
/// has no route.
pub fn own_address(any: IpAddr) -> Option<IpAddr> {
    // Addresses for documentation (RFC 5737, RFC 3849): nothing is sent to them. The system only reports the source
    // address that it would use.
    let to = if any.is_ipv4() { "192.0.2.1:9" } else { "[2001:db8::1]:9" };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_unspecified())
}

/// Raises the limit of file descriptors to the host's maximum: every client takes one, and shells and container
/// runtimes still set the 1,024 that `select` supports.
pub fn raise_file_limit() {
    match rlimit::increase_nofile_limit(u64::MAX) {
        Ok(files) => tracing::debug!(files, "file descriptors"),
        Err(error) => tracing::warn!(%error, "keeps its limit of file descriptors"),
    }
}

/// Raises the limit of locked memory to the host's maximum: it bounds what RDMA can register, and service managers and
/// shells leave it below the hard limit.
pub fn raise_locked_memory_limit() {
    let raised = rlimit::Resource::MEMLOCK.get_hard().and_then(|hard| rlimit::Resource::MEMLOCK.set(hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "keeps its limit of locked memory");
    }
}

/// Bytes that this process may lock, as RDMA does with registered memory: the hard limit, or `u64::MAX` without one or
/// with the capability to lock more (`IPC_LOCK`). `None` if the host does not report it.
pub fn locked_memory_max() -> Option<u64> {
    if may_lock(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()) {
        return Some(u64::MAX);
    }
    rlimit::Resource::MEMLOCK.get_hard().ok()
}

/// Whether `IPC_LOCK`, capability 14, is effective (proc_pid_status(5)).
fn may_lock(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective.is_some_and(|hex| u64::from_str_radix(hex.trim(), 16).is_ok_and(|bits| bits & (1 << 14) != 0))
}

/// File descriptors that a process may have: the hard limit, to which every process here raises its own.
pub fn open_files_max() -> Option<u64> {
    rlimit::Resource::NOFILE.get_hard().ok()
}

fn bound(meminfo: &str, limit: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).map(|kib| kib << 10);
    // "max" if there is no limit.
    let limit = limit.trim().parse::<u64>().ok();
    total.into_iter().chain(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_to_lock_is_read() {
        assert!(
            may_lock("Name:\tx\nCapInh:\t0\nCapEff:\t000001ffffffffff\n") && may_lock("CapEff:\t0000000000004000\n")
        );
        assert!(!may_lock("CapEff:\t00000000a80425fb\n"), "what container runtimes give unasked");
        assert!(!may_lock("CapPrm:\t000001ffffffffff\n") && !may_lock(""));
    }

    #[test]
    fn all_memory_that_may_be_locked_is_taken() {
        let limit = rlimit::Resource::MEMLOCK;
        let hard = limit.get_hard().unwrap();
        limit.set(hard / 2, hard).unwrap();
        raise_locked_memory_limit();
        assert_eq!(limit.get().unwrap(), (hard, hard));
    }

    #[test]
    fn the_lesser_of_host_and_control_group_counts() {
        let meminfo = "MemTotal:        1024 kB\nMemFree:  1 kB\n";
        assert_eq!(bound(meminfo, "max\n"), Some(1 << 20));
        assert_eq!(bound(meminfo, "4096\n"), Some(4096));
        assert_eq!((bound("", "4096"), bound("", "")), (Some(4096), None));
        assert!(memory_bytes().is_none_or(|bytes| bytes > 1 << 20));
    }
}
