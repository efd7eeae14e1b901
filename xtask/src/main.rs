//! Project chores in Rust, so that they run the same everywhere: `cargo xtask tidy`.

use std::process::ExitCode;

mod tidy;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => tidy::run(),
        _ => {
            eprintln!("usage: cargo xtask tidy    check style and structure: {}", tidy::SUMMARY);
            ExitCode::from(2)
        }
    }
}
