//! Pure cores take `now`: none of them reads a clock.

use super::Source;

/// Folders and files of the pure cores, each with what it decides.
pub(super) const PURE: &[&str] = &[
    "kv-cache/src/",
    "engine/src/fair/",
    "engine/src/scheduler/",
    "kv-transfer/src/driver/",
    "kv-transfer/src/get/",
    "kv-transfer/src/put/",
    "kv-transfer/src/role.rs",
    "node/src/membership/etcd/view.rs",
    "router/src/admission/",
    "router/src/placement/",
    "router/src/recovery/",
    "decode-worker/src/grants/",
];

const CLOCKS: &[&str] =
    &["Instant::now", "SystemTime::now", "Utc::now", "Local::now", ".elapsed()", "thread::sleep", "time::sleep"];

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    findings(sources, PURE)
}

fn findings(sources: &[Source], pure: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for core in pure {
        let mut files = sources.iter().filter(|s| s.path.starts_with(core) && s.is_product_code()).peekable();
        if files.peek().is_none() {
            found.push(format!("{core} is no pure core any more: correct xtask/src/tidy/clocks.rs"));
        }
        for (source, (line, text)) in files.flat_map(|s| s.product_lines().map(move |line| (s, line))) {
            let code = text.split("//").next().unwrap_or_default();
            if let Some(clock) = CLOCKS.iter().find(|clock| code.contains(**clock)) {
                found.push(format!("{}:{line}: `{clock}` in a pure core: take `now`", source.path));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_reads_a_clock_is_found() {
        let found = |text: &str| {
            let source = Source { path: "router/src/placement/cost.rs".into(), text: text.into() };
            findings(&[source], &["router/src/placement/"]).len()
        };
        assert_eq!(found("fn f() { let now = Instant::now(); }"), 1);
        assert_eq!(found("fn f(since: Instant) -> bool { since.elapsed() > MAX }"), 1);
        assert_eq!(found("// not Instant::now\nfn f(now: Instant) {}\n#[cfg(test)]\nmod tests { Instant::now() }"), 0);
    }

    #[test]
    fn a_core_that_moved_is_found() {
        let elsewhere = Source { path: "router/src/place.rs".into(), text: String::new() };
        assert_eq!(findings(&[elsewhere], &["router/src/placement/"]).len(), 1);
    }
}
