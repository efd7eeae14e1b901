//! Generates the messages and services from `proto/`. No protoc needed: protox compiles the files.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["inference", "worker", "membership", "common"].map(|f| format!("proto/baton/v1/{f}.proto"));
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(&files, ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
