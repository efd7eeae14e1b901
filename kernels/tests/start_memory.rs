//! A start without memory. A test of its own process, whose address space it limits.
#![cfg(target_os = "linux")]

use baton_kernels::cpu::{CpuConfig, CpuKernels, SimdLevel};
use baton_kernels::device::DeviceError;
use baton_types::MemoryKind;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More than this process has. Less than any mapping for weights, which is a huge page longer than they are.
const ROOM: u64 = 1 << 20;

#[test]
fn known_answers_without_memory_are_no_wrong_answers() {
    let unlimited = getrlimit(Resource::As);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix("kB")).unwrap();
    let bytes = size.trim().parse::<u64>().unwrap() << 10;
    setrlimit(Resource::As, Rlimit { current: Some(bytes + ROOM), ..unlimited }).unwrap();
    let detected = SimdLevel::detect();
    let started = CpuKernels::new(CpuConfig::default()).map(drop);
    setrlimit(Resource::As, unlimited).unwrap();

    for error in [detected.map(drop).unwrap_err(), started.unwrap_err()] {
        assert!(matches!(error, DeviceError::OutOfMemory { kind: MemoryKind::Host, .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("known answers of") && text.contains("ulimit -v"), "{text}");
    }
    // Nothing was concluded: with memory, the processor's best level is used.
    let best = SimdLevel::ALL.into_iter().rev().find(|level| level.available());
    assert_eq!(SimdLevel::detect().ok(), best);
}
