//! Who may take pool memory for memory of the host: the named places of the transfer, and nobody in a worker. All other code reaches KV by
//! the operations of `PoolMemory`, which a device with memory of its own implements.

use super::Source;

/// Crates that move KV, whatever device computes it.
const ANY_DEVICE: &[&str] = &["kv-transfer/", "worker/", "prefill-worker/", "decode-worker/"];
/// Places that ask whether memory is the host's, or allocate such memory for themselves.
const MAY_NAME: &[&str] = &[
    // Direct copies and bounded buffers, and the sockets that use both.
    "kv-transfer/src/transport/pool.rs",
    "kv-transfer/src/transport/tcp/",
    // UCX's registration.
    "kv-transfer/src/ucx/context.rs",
    // Trials and benchmarks have pools of their own.
    "kv-transfer/src/trial.rs",
    "kv-transfer/src/bench.rs",
];

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources.iter().filter(|s| s.is_product_code() && any(ANY_DEVICE, s) && !any(MAY_NAME, s)) {
        let named = |line: &str| line.split("//").next().unwrap_or_default().contains("HostPool");
        if let Some((line, _)) = source.product_lines().find(|(_, line)| named(line)) {
            found.push(format!("{}:{line}: pool memory may be on a device: use `PoolMemory`", source.path));
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
        assert_eq!(found("worker/src/a.rs", "// no HostPool\n#[cfg(test)]\nmod tests { HostPool::new(1) }"), 0);
    }
}
