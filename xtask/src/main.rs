//! Project chores in Rust, so that they run the same everywhere: `cargo xtask tidy`, `cargo codegen`.

use std::path::Path;
use std::process::ExitCode;

#[cfg(feature = "codegen")]
mod codegen;
mod tidy;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask stands in the repository");
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => tidy::run(root),
        #[cfg(feature = "codegen")]
        ["codegen", ref rest @ ..] => match codegen::run(root, rest == ["--check"]) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("codegen: {error:#}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: cargo xtask tidy          check style and structure: {}", tidy::SUMMARY);
            eprintln!("       cargo codegen [--check]   generate the protobuf code, or compare it");
            ExitCode::from(2)
        }
    }
}
