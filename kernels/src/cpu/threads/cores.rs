//! Cores of the workers.

#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A core for each of `count` threads, if this process may use exactly as many: then each thread has one to itself, and none is left idle. With
/// more cores other processes may compute on some of them, so the system chooses better; with fewer, threads have to share.
#[cfg(target_os = "linux")]
pub(super) fn one_each(count: usize) -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    if allowed.count() as usize != count {
        return Vec::new();
    }
    (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect()
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
