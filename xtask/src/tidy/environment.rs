//! Only `node` reads environment variables.

use super::Source;

/// Calls that read a variable at run time. `env!` reads it at compile time, so it is not one of them.
const READS: &[&str] =
    &["env::var", "vars_os()", "env::set_var", "env::remove_var", "Env::prefixed", "Env::raw", "Env::var"];

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let elsewhere = |s: &&Source| s.is_product_code() && !s.path.starts_with("node/") && !s.path.ends_with("build.rs");
    for source in sources.iter().filter(elsewhere) {
        for (line, text) in source.product_lines() {
            let code = text.split("//").next().unwrap_or_default();
            // clap reads the variable named by an argument's `env`.
            let argument =
                code.trim_start().starts_with("#[arg(") && (code.contains("env =") || code.contains(", env"));
            if argument || READS.iter().any(|read| code.contains(read)) {
                found.push(format!("{}:{line}: only `node` reads environment variables", source.path));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_outside_of_node_is_found() {
        let found = |path: &str, text: &str| check(&[Source { path: path.into(), text: text.into() }]).len();
        for read in ["std::env::var(\"HOME\")", "std::env::vars_os()", "    #[arg(long, env = \"BATON_X\")]"] {
            assert_eq!((found("router/src/a.rs", read), found("node/src/a.rs", read)), (1, 0), "{read}");
        }
        assert_eq!(found("router/src/a.rs", "env!(\"CARGO_PKG_VERSION\") // not env::var"), 0);
        assert_eq!(found("tests/src/a.rs", "std::env::var(\"SEED\")"), 0);
    }
}
