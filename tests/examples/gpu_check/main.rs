//! The program of `tests/gpu/check`: checks and measures the CUDA engine on a GPU, or runs the same code on a recorded one.
//!
//! It writes one JSON file per part, and fails if anything is wrong. `tests/gpu/check` builds it, packs it with kernels and workers, and runs it on
//! a machine that has a GPU and no Rust.

mod bench;
mod clusters;
mod correct;
mod decoder;
mod invariance;
mod table;
mod ways;

use anyhow::{Context, bail};
use baton_kernels::cuda::CudaConfig;
use baton_kernels::cuda::check::{How, SeededDefect, Target, Under};
use baton_kernels::numerics::{Half, TensorCore};
use clap::{Args, Parser, Subcommand};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Checks and measures the CUDA engine.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Args)]
pub(crate) struct Where {
    /// `cuda:N`, `recorded:tc16f25` or `recorded:tc8f24`.
    #[arg(long)]
    device: String,
    /// Folder of the files of kernels.
    #[arg(long)]
    kernels: PathBuf,
    /// Small shapes and few repeats. Always so on a recorded GPU.
    #[arg(long)]
    quick: bool,
    /// The commit that this was built of.
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// A defect that `--kernels` have, or that a recorded GPU is to have.
    #[arg(long)]
    defect: Option<SeededDefect>,
}

#[derive(Subcommand)]
enum Verb {
    /// Opens the device, and names it.
    Open {
        #[command(flatten)]
        on: Where,
    },
    /// Known answers, every kernel against its twin, and programs command by command.
    Correct {
        #[command(flatten)]
        on: Where,
        #[arg(long)]
        out: PathBuf,
        /// In full size on a recorded GPU, too.
        #[arg(long)]
        whole: bool,
    },
    /// Small launches of every kernel, compared with nothing: for compute-sanitizer.
    Small {
        #[command(flatten)]
        on: Where,
        /// Runs a program too, with graphs, drafts and what is preempted. Its padded rows read what nobody wrote.
        #[arg(long)]
        program: bool,
    },
    /// Fails unless the kernels' defect is found, and named after its kernel.
    Seeded {
        #[command(flatten)]
        on: Where,
    },
    /// The same rows in every way of serving.
    Invariance {
        #[command(flatten)]
        on: Where,
        #[arg(long)]
        out: PathBuf,
    },
    /// Prints a digest of each row that a request samples alone.
    Alone {
        #[command(flatten)]
        on: Where,
    },
    /// One process against two: clusters of real workers.
    Clusters {
        #[command(flatten)]
        on: Where,
        #[arg(long)]
        out: PathBuf,
    },
    /// Times of steps and of kernels.
    Bench {
        #[command(flatten)]
        on: Where,
        #[arg(long)]
        out: PathBuf,
    },
    /// Joins the parts' files of a folder into a table, and fails if a part failed.
    Table {
        #[arg(long)]
        results: PathBuf,
        #[arg(long)]
        out: PathBuf,
    },
    /// Stands in for compute-sanitizer in a dry run: its race detector reports the kernels without a barrier.
    StandIn {
        #[arg(long)]
        tool: String,
        #[arg(long = "error-exitcode")]
        code: u8,
        #[arg(trailing_var_arg = true)]
        command: Vec<String>,
    },
}

impl Where {
    /// What is checked, in a format of 16 bits.
    pub(crate) fn under(&self, half: Half) -> anyhow::Result<Under> {
        if let Some(ordinal) = self.device.strip_prefix("cuda:") {
            let ordinal = ordinal.parse().context("a device is cuda:N")?;
            return Ok(Under::Gpu(CudaConfig { ordinal, half, kernels: self.kernels.clone() }));
        }
        let cores = match self.device.as_str() {
            "recorded:tc16f25" => TensorCore::Tc16F25,
            "recorded:tc8f24" => TensorCore::Tc8F24,
            other => bail!("{other} is none of cuda:N, recorded:tc16f25 and recorded:tc8f24"),
        };
        Ok(Under::Recorded { cores, half, defect: self.defect })
    }

    pub(crate) fn is_recorded(&self) -> bool {
        self.device.starts_with("recorded:")
    }

    /// Whether shapes are small.
    pub(crate) fn is_quick(&self) -> bool {
        self.quick || self.is_recorded()
    }
}

/// Writes a part's outcome. `failed` says what is wrong.
pub(crate) fn write(on: &Where, out: &Path, part: &str, mut outcome: Value, failed: &[String]) -> anyhow::Result<()> {
    outcome["part"] = part.into();
    outcome["run"] = json!({"commit": on.commit, "device": on.device, "quick": on.quick});
    outcome["failed"] = failed.into();
    std::fs::write(out, serde_json::to_string_pretty(&outcome)? + "\n").with_context(|| out.display().to_string())?;
    if failed.is_empty() {
        println!("{part}: passed");
        return Ok(());
    }
    bail!("{part}: {}", failed.join("\n"))
}

/// Runs a part. One that ends before it has written its outcome has failed, too.
fn part(
    name: &str,
    on: &Where,
    out: &Path,
    run: impl FnOnce(&Where, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if out.exists() {
        std::fs::remove_file(out).with_context(|| out.display().to_string())?;
    }
    match run(on, out) {
        Err(error) if !out.exists() => write(on, out, name, json!({}), &[format!("{error:#}")]),
        ended => ended,
    }
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().verb {
        Verb::Open { on } => println!("{}", Target::open(&on.under(Half::Bf16)?, How::Plain)?.gpu().name),
        Verb::Correct { on, out, whole } => part("correct", &on, &out, |on, out| correct::run(on, out, whole))?,
        Verb::Small { on, program } => correct::small(&on, program)?,
        Verb::Seeded { on } => correct::seeded(&on)?,
        Verb::Invariance { on, out } => part("invariance", &on, &out, invariance::run)?,
        Verb::Alone { on } => invariance::alone(&on)?,
        Verb::Clusters { on, out } => part("clusters", &on, &out, clusters::run)?,
        Verb::Bench { on, out } => part("bench", &on, &out, bench::run)?,
        Verb::Table { results, out } => table::run(&results, &out)?,
        Verb::StandIn { tool, code, command } => {
            let [program, arguments @ ..] = &command[..] else { bail!("no command") };
            let status = Command::new(program).args(arguments).status()?;
            let races = tool == "racecheck" && arguments.iter().any(|argument| argument == "barrier");
            return Ok(ExitCode::from(if races { code } else { u8::from(!status.success()) }));
        }
    }
    Ok(ExitCode::SUCCESS)
}
