//! The check of a GPU's kernels, on recorded GPUs: what is right passes, and each seeded defect is found and named after its kernel.

use baton_kernels::cuda::check::{Compared, Extent, How, SeededDefect, Target, Under};
use baton_kernels::numerics::{Half, TensorCore};

fn compared(cores: TensorCore, half: Half, defect: Option<SeededDefect>) -> Compared {
    let target = Target::open(&Under::Recorded { cores, half, defect }, How::Checked).unwrap();
    target.device().unwrap();
    target.ops(1, Extent::Small).unwrap();
    target.compared().unwrap()
}

#[test]
fn what_is_right_passes() {
    for (cores, half) in [(TensorCore::Tc16F25, Half::Bf16), (TensorCore::Tc8F24, Half::F16)] {
        let Compared { launches, bytes, findings, found, .. } = compared(cores, half, None);
        assert_eq!((findings, found), (Vec::new(), 0));
        assert!(bytes > 500_000, "{bytes} bytes");
        // All that a step may be made of.
        let name = if half == Half::Bf16 { "bf16" } else { "f16" };
        let tiles =
            [16, 32, 64].into_iter().flat_map(|n| [8, 16, 32, 64, 128].map(|m| format!("gemm_few_{name}_n{n}_m{m}")));
        let heads =
            ["prefill", "decode"].into_iter().flat_map(|of| [64, 128, 256].map(|d| format!("attend_{of}_{name}_d{d}")));
        let others = ["embed", "norm", "gemm_many", "rope_store", "attend_merge", "silu_mul", "select"];
        let others = others.map(|kernel| format!("{kernel}_{name}"));
        let slots = ["sample", "scatter", "clear_counts", "count_tokens", "copy_rows", "sum_rows"].map(str::to_owned);
        for kernel in tiles.chain(heads).chain(others).chain(slots) {
            assert!(launches.contains_key(&kernel), "{kernel} is not checked: {launches:?}");
        }
    }
}

#[test]
fn each_seeded_defect_is_found_and_named() {
    for defect in SeededDefect::ALL {
        let Compared { findings, found, .. } = compared(TensorCore::Tc16F25, Half::Bf16, Some(defect));
        // Only a race detector sees a missing barrier for sure.
        assert_eq!(found > 0, defect != SeededDefect::Barrier, "{defect}: {findings:?}");
        let named = |what: &str| what.starts_with(defect.kernel());
        assert!(findings.iter().all(|finding| named(&finding.what)), "{defect}: {findings:?}");
    }
}

#[test]
#[ignore = "make test-full: every shape that a GPU is checked with"]
fn every_shape_passes() {
    for (cores, half) in [(TensorCore::Tc16F25, Half::F16), (TensorCore::Tc8F24, Half::Bf16)] {
        let target = Target::open(&Under::Recorded { cores, half, defect: None }, How::Checked).unwrap();
        target.ops(2, Extent::Whole { rounds: 1 }).unwrap();
        assert_eq!(target.compared().unwrap().findings, []);
    }
}
