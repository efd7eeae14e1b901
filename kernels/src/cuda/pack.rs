//! A file of kernels: the cubins of one target, as `cargo xtask cubins` packs them.
//!
//! It begins with a mark and a manifest in JSON, which says where each cubin lies, and of which sources all of them were made.

use super::gpu::CUDA_MIN;
use super::{CudaError, Gpu, sources};
use serde::Deserialize;
use std::path::{Path, PathBuf};

const MARK: &[u8; 8] = b"BATONCU1";

/// Where the file of a target is.
pub(super) fn path(folder: &Path, target: &str) -> PathBuf {
    folder.join(format!("{target}.cubins"))
}

/// The kernels for a GPU, if its driver loads them.
pub(super) fn find(folder: &Path, gpu: &Gpu) -> Result<Vec<Image>, CudaError> {
    if gpu.cuda < CUDA_MIN {
        return Err(CudaError::OldDriver { name: gpu.name.clone(), has: gpu.cuda, needs: CUDA_MIN });
    }
    read(folder, gpu.target()?.name)
}

/// The kernels of a target, which must be of this build.
pub(super) fn read(folder: &Path, target: &str) -> Result<Vec<Image>, CudaError> {
    let path = path(folder, target);
    let bytes = std::fs::read(&path)
        .map_err(|error| CudaError::Pack { path: path.display().to_string(), reason: error.to_string() })?;
    parse(&path, &bytes, target, sources::digest())
}

#[derive(Deserialize)]
struct Manifest {
    target: String,
    digest: String,
    modules: Vec<Module>,
}

#[derive(Deserialize)]
struct Module {
    name: String,
    offset: usize,
    bytes: usize,
    /// Of the cubin, in hexadecimal digits.
    blake3: String,
    kernels: Vec<String>,
}

/// A cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// The source that it was compiled from.
    pub(crate) name: String,
    pub(crate) cubin: Vec<u8>,
    /// What it has.
    pub(crate) kernels: Vec<String>,
}

/// The cubins of a file, which must be for `target` and made of the sources with this digest.
fn parse(path: &Path, bytes: &[u8], target: &str, digest: &str) -> Result<Vec<Image>, CudaError> {
    let refuse = |reason: String| CudaError::Pack { path: path.display().to_string(), reason };
    let cut = || refuse("it is cut off, or no file of kernels".into());
    let rest = bytes.strip_prefix(MARK).ok_or_else(cut)?;
    let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
    let text = rest.get(..u32::from_le_bytes(*length) as usize).ok_or_else(cut)?;
    let manifest: Manifest = serde_json::from_slice(text).map_err(|error| refuse(error.to_string()))?;
    if manifest.target != target {
        return Err(refuse(format!("it is for {}, this GPU needs {target}", manifest.target)));
    }
    if manifest.digest != digest {
        return Err(refuse("its kernels are of another version".into()));
    }
    let image = |module: Module| {
        let end = module.offset.checked_add(module.bytes).ok_or_else(cut)?;
        let cubin = bytes.get(module.offset..end).filter(|cubin| !cubin.is_empty()).ok_or_else(cut)?;
        if blake3::hash(cubin).to_hex().as_str() != module.blake3 {
            return Err(refuse(format!("{} in it is damaged", module.name)));
        }
        Ok(Image { name: module.name, cubin: cubin.to_vec(), kernels: module.kernels })
    };
    manifest.modules.into_iter().map(image).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUBIN: [u8; 8] = [7; 8];

    /// A file with one module.
    fn file(target: &str, module: impl Fn(usize) -> String) -> Vec<u8> {
        let manifest = |offset| {
            let module = module(offset);
            format!(r#"{{"target":"{target}","compiler":"13","digest":"abc","modules":[{module}]}}"#)
        };
        // Its offset has three digits.
        let manifest = manifest(MARK.len() + 4 + manifest(100).len());
        let length = (manifest.len() as u32).to_le_bytes();
        [MARK, &length[..], manifest.as_bytes(), &CUBIN].concat()
    }

    #[test]
    fn modules_are_where_the_manifest_says() {
        let module = |bytes: usize| {
            move |offset: usize| {
                let blake3 = blake3::hash(&CUBIN).to_hex();
                format!(
                    r#"{{"name":"norm","offset":{offset},"bytes":{bytes},"blake3":"{blake3}","kernels":["norm_bf16"]}}"#
                )
            }
        };
        let parsed = |bytes: &[u8], target, digest| parse(Path::new("k"), bytes, target, digest);
        let whole = file("sm_80", module(8));
        let images = parsed(&whole, "sm_80", "abc").unwrap();
        let kernels = vec!["norm_bf16".to_owned()];
        assert_eq!(images, [Image { name: "norm".into(), cubin: CUBIN.to_vec(), kernels }]);
        let mut damaged = whole.clone();
        *damaged.last_mut().unwrap() ^= 1;
        for (bytes, target, digest, part) in [
            (whole.clone(), "sm_90a", "abc", "it is for sm_80, this GPU needs sm_90a"),
            (whole.clone(), "sm_80", "abd", "another version"),
            (whole[..20].to_vec(), "sm_80", "abc", "cut off"),
            (b"BATON".to_vec(), "sm_80", "abc", "cut off"),
            (file("sm_80", module(8000)), "sm_80", "abc", "cut off"),
            (file("sm_80", module(usize::MAX)), "sm_80", "abc", "cut off"),
            (file("sm_80", |_| "{}".into()), "sm_80", "abc", "missing field"),
            (damaged, "sm_80", "abc", "norm in it is damaged"),
        ] {
            let error = parsed(&bytes, target, digest).unwrap_err().to_string();
            assert!(error.contains(part) && error.starts_with("k: "), "{error}");
        }
    }
}
