//! `cargo codegen`: generates the `proto` crate's protobuf messages, services and descriptors from its `.proto` files.
//!
//! The result is committed, so a build needs neither protoc nor a protobuf compiler in Rust. The latter alone would take a minute to
//! build.

use anyhow::Context;
use prost::Message as _;
use std::fs;
use std::path::Path;

const FILES: [&str; 7] = [
    "baton/v1/inference",
    "baton/v1/worker",
    "baton/v1/membership",
    "baton/v1/common",
    "baton/v1/admin",
    "baton/v1/telemetry",
    "inference/grpc_service",
];

/// Writes the generated files, or with `check` only compares them.
pub(crate) fn run(root: &Path, check: bool) -> anyhow::Result<()> {
    let (protos, committed) = (root.join("proto/proto"), root.join("proto/src/generated"));
    let fresh = root.join("target/codegen");
    fs::create_dir_all(&fresh)?;
    let descriptors = protox::compile(FILES.map(|f| protos.join(format!("{f}.proto"))), [&protos])?;
    fs::write(fresh.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").out_dir(&fresh).compile_fds(descriptors)?;
    for name in ["baton.v1.rs", "inference.rs", "descriptors.bin"] {
        let (from, to) = (fresh.join(name), committed.join(name));
        if !check {
            fs::create_dir_all(&committed)?;
            fs::copy(&from, &to).with_context(|| format!("cannot write {}", to.display()))?;
        } else if fs::read(&from)? != fs::read(&to).unwrap_or_default() {
            anyhow::bail!("{} is not what the .proto files give: run `cargo codegen`", to.display());
        }
    }
    println!("codegen: proto/src/generated {}", if check { "is current" } else { "written" });
    Ok(())
}
