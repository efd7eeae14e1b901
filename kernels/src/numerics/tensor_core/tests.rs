//! The twin in Rust against the one in C++ (`tests/gpu/facts/twin.h`), which had the bits of an H100 and of an H200 in every kind of inputs.

use super::inputs::Kind;
use super::{Half, TensorCore};
use crate::random::Random;

/// Results of each kind.
const RESULTS: usize = 500;

/// FNV-1a over the results of the C++ twin, by kind.
const RECORDED: [(TensorCore, Half, [u64; 9]); 4] = [
    (
        TensorCore::Tc16F25,
        Half::Bf16,
        [
            0xf943_afe8_e006_ac6e,
            0x02bc_5a0a_1d88_df5f,
            0x0da0_52c5_7aa2_0462,
            0x7d8b_4381_94d2_7095,
            0xbd68_2ce0_2baa_dae1,
            0x7086_1056_ef9f_f42d,
            0xa1c4_792f_d943_6d6b,
            0x610f_3aa1_99d6_8a30,
            0x380d_4a90_ec90_4566,
        ],
    ),
    (
        TensorCore::Tc16F25,
        Half::F16,
        [
            0x164c_e21a_6d78_0d3b,
            0x1f49_64a4_9876_819d,
            0xeeb3_1e08_1b6c_ef9e,
            0xcde7_69ba_830b_9ddf,
            0x942b_78a1_458c_e293,
            0xdbc9_e5e8_6c68_f552,
            0xcb1f_ee9e_f5dc_6d0a,
            0x3cd1_2593_f81b_a98e,
            0x3892_71dd_a375_e9d7,
        ],
    ),
    (
        TensorCore::Tc8F24,
        Half::Bf16,
        [
            0x8337_cacc_b344_e247,
            0x7a88_e5a0_f3f4_41ce,
            0x6257_87b8_f4f3_e1a0,
            0xe67d_06b2_e29b_684f,
            0xcc51_f87f_51c3_217d,
            0x95b4_c9a7_9618_9c79,
            0x4d32_53c0_b586_365d,
            0x5f33_1b18_21b8_f5ae,
            0xed09_cc9d_a939_1888,
        ],
    ),
    (
        TensorCore::Tc8F24,
        Half::F16,
        [
            0xd5dd_744f_a4d3_88c3,
            0xb4ea_d142_d150_5afd,
            0x7777_5827_9f43_44fe,
            0x8799_ff49_b4cf_e4db,
            0xe831_fce0_0943_c176,
            0x8c16_03e9_c4a7_91bd,
            0x1da7_4a49_2d75_3b8b,
            0xbc24_e4a7_b119_4c4f,
            0x98bb_714f_dc2e_7499,
        ],
    ),
];

fn digest(cores: TensorCore, half: Half, kind: Kind, seed: u64) -> u64 {
    let (mut random, mut digest) = (Random(seed), 0xcbf2_9ce4_8422_2325u64);
    for k in [16, 72] {
        let x = kind.operands(&mut random, half, RESULTS * k, true);
        let w = kind.operands(&mut random, half, RESULTS * k, false);
        for (x, w) in x.chunks_exact(k).zip(w.chunks_exact(k)) {
            let result = cores.dot(half, kind.accumulator(&mut random), x, w);
            digest = (digest ^ u64::from(result.to_bits())).wrapping_mul(0x100_0000_01b3);
        }
    }
    digest
}

#[test]
fn the_twin_has_the_bits_of_the_one_that_was_measured() {
    for (cores, half, recorded) in RECORDED {
        for (seed, (kind, want)) in Kind::ALL.into_iter().zip(recorded).enumerate() {
            let got = digest(cores, half, kind, seed as u64 + 1);
            assert_eq!(got, want, "{} {half:?} {kind:?}: {got:#018x}", cores.name());
        }
    }
}

#[test]
fn zeros_behind_the_last_product_change_nothing() {
    let mut random = Random(7);
    for (cores, half) in [(TensorCore::Tc16F25, Half::Bf16), (TensorCore::Tc8F24, Half::F16)] {
        for kind in Kind::ALL {
            for k in [1, 7, 17, 40] {
                let mut x = kind.operands(&mut random, half, k, true);
                let mut w = kind.operands(&mut random, half, k, false);
                let want = cores.dot(half, 0.0, &x, &w);
                x.resize(48, 0);
                w.resize(48, 0);
                assert_eq!(cores.dot(half, 0.0, &x, &w).to_bits(), want.to_bits(), "{kind:?} {k}");
            }
        }
    }
}
