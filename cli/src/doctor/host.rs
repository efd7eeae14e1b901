//! Checks the host: processor, memory, and a process's limits.

use super::finding::{Finding, Verdict};
use baton_node::config::ByteSize;
use baton_node::host::{locked_memory_max, memory_bytes, open_files_max};

/// Bytes of a KV pool that a process should at least be able to lock for RDMA, if the pool's size is unknown. A lower limit is a default
/// of 64 KiB to 8 MiB that was not set on purpose.
const MEMLOCK_MIN: u64 = 1 << 30;
/// Descriptors for a few thousand clients and the connections between workers.
const FILES_MIN: u64 = 4_096;

/// Runs all checks. `rdma` says whether KV will move over RDMA, and `pool` is the size of the pool to register for it.
pub(super) fn look(rdma: bool, pool: Option<ByteSize>) -> Vec<Finding> {
    vec![processor(), memory(memory_bytes()), memlock(locked_memory_max(), pool, rdma), files(open_files_max())]
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

/// Instruction sets that the kernels use.
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

fn memlock(bytes: Option<u64>, pool: Option<ByteSize>, rdma: bool) -> Finding {
    let remedy = "RDMA registers the whole pool: run with `ulimit -l unlimited` (LimitMEMLOCK=infinity under systemd); in Kubernetes the \
                  container runs as root with IPC_LOCK (rdma.memlock: root in the chart), or the node's container runtime starts it \
                  without the limit (rdma.memlock: nonroot)";
    let (bytes, found) = match bytes {
        None => return Finding::new("memlock", Verdict::Warning, "the limit cannot be read", remedy),
        Some(u64::MAX) => return Finding::ok("memlock", "unlimited"),
        Some(bytes) if bytes < MEMLOCK_MIN => (bytes, format!("{} KiB", bytes >> 10)),
        Some(bytes) => (bytes, gib(bytes)),
    };
    match pool {
        Some(pool) if bytes < pool.0 => {
            let found = format!("{found}, and the pool takes {pool}");
            Finding::new("memlock", Verdict::Failure.if_wanted(rdma), found, remedy)
        }
        Some(pool) => Finding::ok("memlock", format!("{found}; the pool takes {pool}")),
        None if bytes >= MEMLOCK_MIN => Finding::ok("memlock", format!("{found}; pools must be smaller")),
        None => Finding::new("memlock", Verdict::Failure.if_wanted(rdma), found, remedy),
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
            assert_eq!(memlock(bytes, None, rdma).verdict, expected, "{bytes:?} {rdma}");
        }
        assert_eq!(files(Some(1_024)).verdict, Verdict::Warning);
        assert_eq!(files(Some(1 << 20)).verdict, Verdict::Ok);
    }

    #[test]
    fn the_pool_has_to_fit_into_what_may_be_locked() {
        for (bytes, pool, rdma, expected) in [
            (8 << 30, "40GiB", true, Verdict::Failure),
            (8 << 30, "40GiB", false, Verdict::Absent),
            (40 << 30, "40GiB", true, Verdict::Ok),
            (512 << 20, "256MiB", true, Verdict::Ok),
            (u64::MAX, "40GiB", true, Verdict::Ok),
        ] {
            assert_eq!(memlock(Some(bytes), Some(pool.parse().unwrap()), rdma).verdict, expected, "{bytes} {pool}");
        }
        let told = memlock(Some(8 << 30), Some("40GiB".parse().unwrap()), true);
        assert_eq!(told.found, "8.0 GiB, and the pool takes 40GiB");
    }
}
