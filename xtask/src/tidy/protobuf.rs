//! Generated protobuf types stop at the conversions of `proto` and at one `grpc` module per process: all other code uses `types`.

use super::Source;

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources.iter().filter(|s| s.is_product_code() && !may_name(&s.path)) {
        if let Some((line, _)) = source.product_lines().find(|(_, line)| names(line)) {
            found.push(format!("{}:{line}: protobuf types stop at the crate's `grpc` module", source.path));
        }
    }
    found
}

/// `proto` itself, `grpc` below the sources of a crate, and the registry in routers, which is a service of its own.
fn may_name(path: &str) -> bool {
    let below = path.split_once("/src/").map_or("", |(_, below)| below);
    let edge = below == "grpc.rs" || below.starts_with("grpc/");
    path.starts_with("proto/") || path.starts_with("node/src/membership/embedded/grpc/") || edge
}

fn names(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let imported = code.split("baton_proto").skip(1).any(|rest| !rest.starts_with("::convert"));
    // Part of another module's name, as in `opentelemetry_proto::…::v1::`, does not count.
    let begins = |at: usize| !code[..at].ends_with(|c: char| c == ':' || c == '_' || c.is_alphanumeric());
    imported || code.match_indices("v1::").any(|(at, _)| begins(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.into(), text: text.into() }
    }

    #[test]
    fn types_are_named_at_the_edge_alone() {
        let named = "use baton_proto::v1::LoadReport;";
        let at = |path: &str| check(&[source(path, named)]).len();
        assert_eq!(["router/src/flow/mod.rs", "cli/src/grpc_of.rs"].map(at), [1, 1]);
        assert_eq!(["proto/src/convert.rs", "router/src/grpc/mod.rs", "cli/src/grpc.rs"].map(at), [0; 3]);
        assert_eq!(["router/src/tests/http.rs", "tests/src/load.rs", "node/src/grpc/tests.rs"].map(at), [0; 3]);
        let with = |text: &str| check(&[source("worker/src/a.rs", text)]).len();
        assert_eq!(with("use baton_proto::{convert, v1};"), 1);
        assert_eq!(with("fn f(report: &v1::LoadReport) {}"), 1);
        assert_eq!(with("use baton_proto::convert::status;\n// as v1::LoadReport says\nuse otlp::v1::AnyValue;"), 0);
        assert_eq!(with("fn f() {}\n#[cfg(test)]\nmod tests { use baton_proto::v1; }"), 0);
    }
}
