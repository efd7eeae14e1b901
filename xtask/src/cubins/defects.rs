//! Defects that are put into one source each, so that a check of a GPU can be seen to fail. The twins of the recorded GPU have the same ones
//! (kernels/src/cuda/driver/defect.rs).

use super::nvrtc::{Compiled, Nvrtc};
use super::sources::{FOLDER, Sources};
use super::{Build, CUDA, OPTIONS};
use anyhow::{Context, ensure};
use std::path::Path;

/// A defect: an edit of one source.
struct Defect {
    name: &'static str,
    /// Path of the source below the folder.
    source: &'static str,
    /// What stands there, exactly so often.
    before: &'static str,
    times: usize,
    after: &'static str,
}

const DEFECTS: [Defect; 5] = [
    Defect { name: "barrier", source: "norm.cu", before: "    __syncthreads();\n", times: 1, after: "" },
    Defect {
        name: "tail",
        source: "gemm_few.cu",
        before: "(p.k + S::COLS - 1) / S::COLS",
        times: 1,
        after: "p.k / S::COLS",
    },
    Defect {
        name: "scale",
        source: "attend_decode.cu",
        before: "weight(scores[at + first], p.factor, top)",
        times: 1,
        after: "weight(scores[at + first], 0.5f * p.factor, top)",
    },
    Defect {
        name: "block-index",
        source: "rope_store.cu",
        before: "token_offset(p.kv, slot, position)",
        times: 1,
        after: "token_offset(p.kv, slot, position & ~(p.kv.block_tokens / 2))",
    },
    Defect {
        name: "unwritten",
        source: "silu_mul.cu",
        before: "if (at >= i64(p.rows) * chunks) return;",
        times: 1,
        after: "if (at + 1 >= i64(p.rows) * chunks) return;",
    },
];

impl Defect {
    /// The source with it.
    fn applied(&self, sources: &Sources) -> anyhow::Result<String> {
        let file = sources.units.iter().find(|file| file.path == self.source);
        let text = &file.with_context(|| format!("{FOLDER}/{} is gone", self.source))?.text;
        let found = text.matches(self.before).count();
        let (name, source, before, times) = (self.name, self.source, self.before, self.times);
        ensure!(found == times, "defect {name}: {FOLDER}/{source} has {before:?} {found} times, not {times}");
        Ok(text.replace(self.before, self.after))
    }
}

/// Writes `folder/DEFECT/TARGET.cubins` for each defect and target.
pub(super) fn write(root: &Path, build: &Build, targets: &[&str], folder: &Path) -> anyhow::Result<()> {
    let (sources, nvrtc) = (Sources::read(root)?, Nvrtc::load(&root.join(CUDA).join("lib"))?);
    for defect in &DEFECTS {
        let text = defect.applied(&sources)?;
        std::fs::create_dir_all(folder.join(defect.name))?;
        for target in targets {
            let mut options = OPTIONS.map(str::to_owned).to_vec();
            options.push(format!("--gpu-architecture={target}"));
            options.push(format!("--include-path={}", root.join(FOLDER).display()));
            let Compiled { cubin, .. } = nvrtc
                .compile(defect.source, &text, &options)
                .with_context(|| format!("defect {} for {target}", defect.name))?;
            let source = defect.source.trim_end_matches(".cu");
            let pack = build.pack_with(target, Some((source, &cubin)));
            std::fs::write(folder.join(defect.name).join(format!("{target}.cubins")), pack)?;
        }
    }
    println!("{}: kernels with one of {} defects each", folder.display(), DEFECTS.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_defect_changes_one_source_and_keeps_its_kernels() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let sources = Sources::read(root).unwrap();
        for defect in &DEFECTS {
            let (text, before) = (defect.applied(&sources).unwrap(), sources.units.iter());
            let before = &before.clone().find(|file| file.path == defect.source).unwrap().text;
            assert_ne!(&text, before);
            assert_eq!(text.matches("__global__").count(), before.matches("__global__").count(), "{}", defect.name);
        }
        let gone = Defect { before: "not there", ..DEFECTS[0] };
        assert!(gone.applied(&sources).unwrap_err().to_string().contains("0 times, not 1"));
    }
}
