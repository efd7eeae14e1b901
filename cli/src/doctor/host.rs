//! The host itself: processor, memory, and what a process may take of it.

use super::finding::{Finding, Verdict};
use baton_node::host::{locked_memory_max, memory_bytes, open_files_max};

/// Bytes that a pool of KV should be able to lock at least, for RDMA: less is a default of 64 KiB to 8 MiB that nobody chose.
const MEMLOCK_MIN: u64 = 1 << 30;
/// Descriptors for some thousand clients and the connections between workers.
const FILES_MIN: u64 = 4_096;

/// Looks at everything; `rdma` says whether KV is to move over RDMA.
pub(super) fn look(rdma: bool) -> Vec<Finding> {
    vec![processor(), memory(memory_bytes()), memlock(locked_memory_max(), rdma), files(open_files_max())]
}

fn processor() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let features = features();
    let found = format!(
        "{cores} cores, {}",
        if features.is_empty() { "no SIMD known here".into() } else { features.join(" ") }
    );
    if features.contains(&"avx2") && features.contains(&"fma") {
        return Finding::ok("processor", found);
    }
    let remedy =
        "CPU workers fall back to portable code here, many times slower: take a host with AVX2 and FMA, or a GPU";
    Finding::new("processor", Verdict::Warning, found, remedy)
}

/// Instruction sets that matter here.
#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let known = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    known.into_iter().filter_map(|(name, is_there)| is_there.then_some(name)).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

fn memory(bytes: Option<u64>) -> Finding {
    match bytes {
        Some(bytes) => Finding::ok("memory", gib(bytes)),
        None => {
            Finding::new("memory", Verdict::Warning, "/proc/meminfo cannot be read", "mount /proc in this container")
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn memlock(bytes: Option<u64>, rdma: bool) -> Finding {
    let remedy = "RDMA registers the whole pool: run with `ulimit -l unlimited` (LimitMEMLOCK=infinity under systemd); in Kubernetes the \
                  container needs IPC_LOCK as root, or a node whose container runtime sets the limit";
    match bytes {
        None => Finding::new("memlock", Verdict::Warning, "the limit cannot be read", remedy),
        Some(u64::MAX) => Finding::ok("memlock", "unlimited"),
        Some(bytes) if bytes >= MEMLOCK_MIN => Finding::ok("memlock", format!("{}; pools must be smaller", gib(bytes))),
        Some(bytes) => {
            Finding::new("memlock", Verdict::Failure.if_wanted(rdma), format!("{} KiB", bytes >> 10), remedy)
        }
    }
}

fn files(count: Option<u64>) -> Finding {
    let remedy = "each client and each connection between workers takes one: raise the hard limit, `ulimit -Hn` (LimitNOFILE under systemd)";
    match count {
        None => Finding::new("open files", Verdict::Warning, "the limit cannot be read", remedy),
        Some(count) if count >= FILES_MIN => Finding::ok("open files", format!("up to {count}")),
        Some(count) => Finding::new("open files", Verdict::Warning, format!("up to {count}"), remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_memlock_fails_where_rdma_is_asked_for() {
        for (bytes, rdma, expected) in [
            (Some(u64::MAX), true, Verdict::Ok),
            (Some(8 << 30), true, Verdict::Ok),
            (Some(8 << 20), true, Verdict::Failure),
            (Some(8 << 20), false, Verdict::Absent),
            (None, false, Verdict::Warning),
        ] {
            assert_eq!(memlock(bytes, rdma).verdict, expected, "{bytes:?} {rdma}");
        }
        assert_eq!(files(Some(1_024)).verdict, Verdict::Warning);
        assert_eq!(files(Some(1 << 20)).verdict, Verdict::Ok);
    }
}
