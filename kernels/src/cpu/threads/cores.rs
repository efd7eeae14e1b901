//! Cores of the workers.

#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A core for each of `count` threads, if this process has exactly as many to itself: then none is left idle. They are taken for its own if
/// it may not use the host's other cores. Where it may use all cores of the host, another worker may compute on them too, and both would
/// keep threads on the same ones. With more cores than threads the system chooses better; with fewer, threads have to share.
#[cfg(target_os = "linux")]
pub(super) fn one_each(count: usize) -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    if allowed.count() as usize != count || count >= online() {
        return Vec::new();
    }
    (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect()
}

/// Cores of the host.
#[cfg(target_os = "linux")]
fn online() -> usize {
    // SAFETY: it reads a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(0)
}

/// Keeps the calling thread on a core. A refusal changes nothing but speed.
#[cfg(target_os = "linux")]
pub(super) fn pin(core: usize) {
    let mut one = CpuSet::new();
    one.set(core);
    if let Err(error) = sched_setaffinity(None, &one) {
        tracing::debug!(core, %error, "a compute thread is not pinned");
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn one_each(_count: usize) -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_core: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn who_may_use_all_cores_of_the_host_takes_none_for_its_own() {
        assert!(online() > 0);
        assert_eq!(one_each(online()), [0; 0], "another worker may do the same");
    }
}
