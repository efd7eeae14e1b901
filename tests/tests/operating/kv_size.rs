//! `baton kv-size` as a user runs it, against the pool that a worker makes of the same numbers.

use anyhow::{Result, ensure};
use baton_node::config::ByteSize;
use baton_tests::processes::baton;
use baton_worker::bring_up;
use baton_worker::settings::{EngineSettings, ModelSettings};
use serde_json::Value;

fn told(arguments: &[&str]) -> Result<Value> {
    let output = baton(&[&["kv-size", "--json"], arguments].concat())?;
    ensure!(output.status.success(), "{output:?}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[test]
fn known_models_have_their_sizes() -> Result<()> {
    for (model, kib) in [("llama-3-8b", 128), ("llama-3-70b", 320), ("llama-3.1-405b", 504)] {
        let sized = told(&[model])?;
        ensure!(sized["bytes_per_token"] == kib << 10, "{sized}");
    }
    let table = String::from_utf8(baton(&["kv-size", "llama-3-8b", "--memory", "40GiB"])?.stdout)?;
    ensure!(table.contains("128 KiB of KV per token") && table.contains("20,480 blocks"), "{table}");
    let unknown = baton(&["kv-size", "llama-9"])?;
    let words = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(unknown.status.code() == Some(1) && words.contains("llama-3.1-405b"), "{words}");
    Ok(())
}

/// The default model: 2 * 30 layers * 3 KV heads * 64 elements * 2 bytes a token, as its file says and as its worker's pool holds.
#[test]
fn the_pool_of_a_worker_agrees() -> Result<()> {
    const BYTES: u64 = 64_000_001;
    for block_tokens in [16, 48] {
        let (block_tokens_text, memory) = (block_tokens.to_string(), BYTES.to_string());
        let flags = ["--memory", &memory, "--block-tokens", &block_tokens_text, "--context", "1,500,1000"];
        let sized = told(&[&["smollm2-135m-instruct"], &flags[..]].concat())?;
        ensure!(sized["bytes_per_token"] == 23_040, "{sized}");

        let kv_cache_bytes = ByteSize(BYTES);
        let settings = EngineSettings { block_tokens, kv_cache_bytes, threads: 1.into(), ..EngineSettings::default() };
        let loaded = bring_up::load(&ModelSettings::default(), &settings, &|_, _| ())?;
        let layout = loaded.map.layout();
        ensure!(sized["bytes_per_token"] == layout.bytes_per_token(), "{sized}, {layout}");
        ensure!(
            sized["blocks"] == loaded.map.blocks(0) && sized["blocks"] == loaded.engine.load().blocks.total,
            "{sized}"
        );
        let region = loaded.map.bytes() as u64;
        ensure!(region <= BYTES && BYTES - region < layout.bytes_per_block() as u64, "{region} bytes");
        for context in sized["contexts"].as_array().into_iter().flatten() {
            let tokens = context["tokens"].as_u64().unwrap_or_default() as usize;
            let blocks = layout.blocks_for(tokens);
            ensure!(context["sequences"] == loaded.map.blocks(0) as usize / blocks, "{context}");
            ensure!(context["bytes"] == blocks * layout.bytes_per_block(), "{context}");
        }
        ensure!(sized["contexts"].as_array().map(Vec::len) == Some(3), "{sized}");
        loaded.engine.stop();

        // The same model known by its name.
        let named = told(&[&["smollm2-135m"], &flags[..]].concat())?;
        ensure!(named["contexts"] == sized["contexts"] && named["groups"] == sized["groups"], "{named}");
    }
    Ok(())
}
