//! One file per target with all its cubins.
//!
//! | Bytes | Contents |
//! |---|---|
//! | 8 | `BATONCU1` |
//! | 4 | length of the manifest, little endian |
//! | .. | the manifest, JSON: `target`, `compiler`, `digest` of the sources and options, and of each module `name`, `offset`, `bytes`, `blake3` and `kernels` |
//! | .. | the modules, each at a multiple of 64 from the start of the file |
//!
//! A module is what became of one source. An engine passes its bytes to `cuModuleLoadData`. An engine with another digest refuses the file.

use anyhow::{Context, ensure};
use serde_json::{Value, json};

const MAGIC: &[u8; 8] = b"BATONCU1";
/// Of a module: ELF files have fields of eight bytes; a cache line does for all.
const ALIGNMENT: usize = 64;

pub(super) struct Module<'a> {
    pub(super) name: &'a str,
    pub(super) kernels: Vec<&'a str>,
    pub(super) cubin: &'a [u8],
}

/// The bytes of a pack.
pub(super) fn packed(target: &str, compiler: &str, digest: &str, modules: &[Module<'_>]) -> Vec<u8> {
    // Offsets depend on the manifest's length, and it on their digits: so it grows until it fits.
    let mut room = 0;
    loop {
        let mut offset = (MAGIC.len() + 4 + room).next_multiple_of(ALIGNMENT);
        let mut described = Vec::new();
        for Module { name, kernels, cubin } in modules {
            described.push(json!({
                "name": name, "offset": offset, "bytes": cubin.len(), "blake3": blake3::hash(cubin).to_hex().as_str(), "kernels": kernels,
            }));
            offset = (offset + cubin.len()).next_multiple_of(ALIGNMENT);
        }
        let manifest =
            json!({"target": target, "compiler": compiler, "digest": digest, "modules": described}).to_string();
        if manifest.len() > room {
            room = manifest.len();
            continue;
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend((room as u32).to_le_bytes());
        bytes.extend(format!("{manifest:<room$}").bytes());
        for module in modules {
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
            bytes.extend(module.cubin);
        }
        return bytes;
    }
}

/// The manifest of a pack, checked against its length.
pub(super) fn manifest(bytes: &[u8]) -> anyhow::Result<Value> {
    let rest = bytes.strip_prefix(MAGIC).context("no pack of cubins")?;
    let (length, rest) = rest.split_first_chunk().context("cut off")?;
    let text = rest.get(..u32::from_le_bytes(*length) as usize).context("cut off")?;
    let manifest: Value = serde_json::from_slice(text)?;
    for module in manifest["modules"].as_array().context("no modules")? {
        let number = |key: &str| module[key].as_u64().with_context(|| format!("no {key}"));
        ensure!(number("offset")? + number("bytes")? <= bytes.len() as u64, "cut off within {}", module["name"]);
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_where_the_manifest_says() {
        let large = vec![7u8; 100_000];
        for count in 0..12 {
            let names: Vec<String> = (0..count).map(|at| format!("module{at}")).collect();
            let cubin = |at: usize| if at.is_multiple_of(3) { &large[..] } else { &large[..at * 31 + 1] };
            let modules: Vec<Module<'_>> = names
                .iter()
                .enumerate()
                .map(|(at, name)| Module { name, kernels: vec!["a", "b"], cubin: cubin(at) })
                .collect();
            let bytes = packed("sm_80", "13.0.88", "abc", &modules);
            let manifest = manifest(&bytes).unwrap();
            assert_eq!(manifest["digest"], "abc");
            for (at, module) in manifest["modules"].as_array().unwrap().iter().enumerate() {
                let [offset, len] = ["offset", "bytes"].map(|key| module[key].as_u64().unwrap() as usize);
                assert_eq!((&bytes[offset..offset + len], offset % ALIGNMENT), (cubin(at), 0));
            }
            if count > 0 {
                assert!(super::manifest(&bytes[..bytes.len() - 1]).is_err());
            }
        }
        assert!(manifest(b"BATONCU").is_err() && manifest(b"BATONCU1\xff\0\0\0{}").is_err());
    }
}
