//! Who may take pool memory for memory of the host: the named places of the transfer, and nobody in a worker. All other code reaches KV by
//! the operations of `PoolMemory`, which a device with memory of its own implements.

use super::Source;

/// Crates that move KV, whatever device computes it.
const ANY_DEVICE: &[&str] = &["kv-transfer/", "worker/", "prefill-worker/", "decode-worker/"];
/// What names host memory, and the places that may.
const NAMES: &[(&str, &[&str])] = &[
    // The type: direct copies and bounded buffers, and the sockets that use both.
    ("HostPool", &["kv-transfer/src/transport/pool.rs", TCP, TRIAL, BENCH]),
    // The transport's question whether its pool is one: UCX's wake-ups, and messages that are sent and stored.
    (".host()", &[TCP, "kv-transfer/src/transport/ucx/connect.rs", "kv-transfer/src/transport/ucx/writing/mod.rs"]),
    // Runs of bytes that sockets send from where they are. A worker gives its free heap back.
    ("memory::host::", &["kv-transfer/src/transport/pool.rs", TCP, BRING_UP]),
    // Whether a device that is given computes in this host's memory, which is then compared with the configured size. How UCX moves KV,
    // and what memory it knows.
    ("MemoryKind::Host", &[BRING_UP, "kv-transfer/src/transport/ucx/data_path.rs", "kv-transfer/src/ucx/context.rs"]),
];
const TCP: &str = "kv-transfer/src/transport/tcp/";
// Trials and benchmarks have pools of their own.
const TRIAL: &str = "kv-transfer/src/trial.rs";
const BENCH: &str = "kv-transfer/src/bench.rs";
const BRING_UP: &str = "worker/src/bring_up.rs";

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources.iter().filter(|s| s.is_product_code() && any(ANY_DEVICE, s)) {
        for (name, _) in NAMES.iter().filter(|(_, places)| !any(places, source)) {
            let named = |line: &str| line.split("//").next().unwrap_or_default().contains(name);
            if let Some((line, _)) = source.product_lines().find(|(_, line)| named(line)) {
                found.push(format!(
                    "{}:{line}: `{name}`: pool memory may be on a device: use `PoolMemory`",
                    source.path
                ));
            }
        }
    }
    found
}

fn any(places: &[&str], source: &Source) -> bool {
    places.iter().any(|place| source.path.starts_with(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_named_in_its_places_alone() {
        let found = |path: &str, text: &str| check(&[Source { path: path.into(), text: text.into() }]).len();
        let named = "fn f(pool: &HostPool) {}";
        assert_eq!(["kv-transfer/src/verify/work.rs", "worker/src/bring_up.rs"].map(|path| found(path, named)), [1, 1]);
        let allowed = ["kv-transfer/src/transport/pool.rs", "kernels/src/kv.rs", "kv-transfer/tests/common/mod.rs"];
        assert_eq!(allowed.map(|path| found(path, named)), [0; 3]);
        for text in ["let h = pool.host();", "use baton_memory::host::Part;", "kind == MemoryKind::Host"] {
            assert_eq!(["kv-transfer/src/verify/work.rs", "worker/src/a.rs"].map(|path| found(path, text)), [1, 1]);
        }
        // Each place may name what it needs and nothing else.
        assert_eq!(found("kv-transfer/src/transport/ucx/writing/mod.rs", "self.pool.host()"), 0);
        assert_eq!(found("kv-transfer/src/transport/ucx/writing/mod.rs", named), 1);
        assert_eq!(found("worker/src/bring_up.rs", "use baton_memory::host::return_free_heap;"), 0);
        assert_eq!(found("worker/src/bring_up.rs", "pool.host()"), 1);
        assert_eq!(found("worker/src/a.rs", "// no HostPool\n#[cfg(test)]\nmod tests { HostPool::new(1) }"), 0);
    }
}
