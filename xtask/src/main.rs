//! Project tasks in Rust, so that they run the same everywhere: `cargo xtask tidy`, `cargo xtask hazards`, `cargo xtask cubins`,
//! `cargo xtask release-check`, `cargo codegen`.

use std::path::Path;
use std::process::ExitCode;

#[cfg(feature = "codegen")]
mod codegen;
mod cubins;
mod hazards;
mod release;
mod tidy;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask stands in the repository");
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => ended("tidy", tidy::run(root)),
        ["hazards", ref rest @ ..] => ended("hazards", hazards::run(rest)),
        ["cubins", ref rest @ ..] => ended("cubins", cubins::run(root, rest)),
        ["release-check"] => ended("release-check", release::check(root)),
        ["record", name] => ended("record", release::record(root, name, None)),
        ["record", name, summary] => ended("record", release::record(root, name, Some(summary))),
        #[cfg(feature = "codegen")]
        ["codegen", ref rest @ ..] => {
            ended("codegen", codegen::run(root, rest == ["--check"]).map(|()| ExitCode::SUCCESS))
        }
        _ => {
            eprintln!("usage: cargo xtask tidy          check style and structure: {}", tidy::SUMMARY);
            eprintln!(
                "       cargo xtask hazards [--present] BINARY...  refuse binaries with (without) deliberate hazards"
            );
            eprintln!(
                "       cargo xtask cubins [--out DIR] [--arch TARGET]... [--defects DIR]  compile the CUDA kernels, within their budgets"
            );
            eprintln!("       cargo xtask release-check  compare what is recorded in the documentation with the code");
            eprintln!(
                "       cargo xtask record NAME [SUMMARY]  record a run: what it wrote, or that it was made at this commit"
            );
            eprintln!("       cargo codegen [--check]   generate the protobuf code, or compare it");
            ExitCode::from(2)
        }
    }
}

fn ended(what: &str, result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("{what}: {error:#}");
        ExitCode::FAILURE
    })
}
