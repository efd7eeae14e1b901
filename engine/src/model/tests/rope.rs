//! Rotary frequencies and tables against values computed by hand.

use crate::families::{Rope, RopeScaling};
use crate::formats::{ModelSource, RandomModel};
use crate::model::{ModelError, inverse_frequencies, rope_table};

fn check(scaling: RopeScaling, dim: usize, expected: &[f64]) {
    let got = inverse_frequencies(&Rope { dim, theta: 10_000.0, scaling: scaling.clone() }).unwrap();
    assert_eq!(got.len(), expected.len(), "{scaling:?}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got / expected - 1.0).abs() < 1e-7, "{scaling:?}, pair {i}: {got} is not {expected}");
    }
}

fn llama3(original_context: usize) -> RopeScaling {
    RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context }
}

#[test]
fn frequencies() {
    check(RopeScaling::None, 8, &[1.0, 0.1, 0.01, 0.001]);
    check(RopeScaling::None, 4, &[1.0, 0.01]);
    check(RopeScaling::Linear { factor: 4.0 }, 4, &[0.25, 0.0025]);
    check(RopeScaling::Factors([1.0, 8.0].into()), 4, &[1.0, 0.00125]);
    // Turns within 8192 positions: 1304, 130, 13.04 (all over 4: kept) and 1.30379728, blended:
    // keep = 0.30379728 / 3 = 0.10126576, 0.001 * ((1 - keep) / 8 + keep).
    check(llama3(8192), 8, &[1.0, 0.1, 0.01, 2.136_075_4e-4]);
    // Within 4096: 6.52 turns are kept, 0.65 are too few.
    check(llama3(4096), 8, &[1.0, 0.1, 0.01, 1.25e-4]);
    // Within 1024: the third turns 1.62974662 times: keep = 0.20991554.
    check(llama3(1024), 8, &[1.0, 0.1, 3.086_761_0e-3, 1.25e-4]);
}

#[test]
fn yarn_divides_pairs_by_their_turns() {
    let yarn = |original_context, beta_fast, beta_slow| RopeScaling::Yarn {
        factor: 4.0,
        original_context,
        beta_fast,
        beta_slow,
        truncate: true,
        amplitude: 1.5,
    };
    // Pairs with 32 and with 1 turns: 8 ln(8192 / 32 TAU) / 2 ln 10000 = 1.61, so 1, and 3.12, so 4: the third is divided by a third, the
    // last by two thirds.
    check(yarn(8192, 32.0, 1.0), 8, &[1.0, 0.1, 0.01 * (0.25 / 3.0 + 2.0 / 3.0), 0.001 * (0.5 / 3.0 + 1.0 / 3.0)]);
    // 0.2 and 1.7: from the first to the second.
    check(yarn(320, 32.0, 1.0), 8, &[1.0, 0.1 * 0.625, 0.0025, 0.00025]);
    // Without whole numbers, as transformers computes them: 64 tokens, from pair -1.0 to pair 2.02 of 8.
    let exact = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        amplitude: 1.0,
    };
    let of_16 =
        [1.0, 0.198_583_520_2, 0.025_595_245_89, 0.007_905_694_15, 0.0025, 7.905_694_15e-4, 2.5e-4, 7.905_694_15e-5];
    check(exact, 16, &of_16);
    let mut attention =
        RandomModel::parse("random:hidden=8,heads=2,head_dim=4").unwrap().spec().layers[0].attention.clone();
    attention.rope = Some(Rope { dim: 4, theta: 10_000.0, scaling: yarn(8192, 32.0, 1.0) });
    let table = rope_table(&attention, 2).unwrap();
    assert_eq!((table.cos[0], table.sin[0], table.cos[2]), (1.5, 0.0, (1.5 * 1.0f64.cos()) as f32));
    attention.rope = None;
    let table = rope_table(&attention, 2).unwrap();
    assert_eq!((table.cos, table.sin), (vec![1.0; 4], vec![0.0; 4]), "nothing is turned");
}

#[test]
fn tables_hold_angles_by_position() {
    let model = RandomModel::parse("random:hidden=8,heads=2,head_dim=4").unwrap();
    let table = rope_table(&model.spec().layers[0].attention, 3).unwrap();
    assert_eq!((table.cos.len(), table.sin.len(), table.dim), (6, 6, 4));
    assert_eq!((&table.cos[..2], &table.sin[..2]), ([1.0, 1.0].as_slice(), [0.0, 0.0].as_slice()));
    let expected = [(1.0f64, 0.01f64), (2.0, 0.02)];
    for (position, (fast, slow)) in expected.into_iter().enumerate() {
        let row = 2 * (position + 1)..2 * (position + 2);
        assert_eq!(table.cos[row.clone()], [fast.cos() as f32, slow.cos() as f32]);
        assert_eq!(table.sin[row], [fast.sin() as f32, slow.sin() as f32]);
    }
}

#[test]
fn factors_must_cover_every_pair() {
    let rope = Rope { dim: 8, theta: 10_000.0, scaling: RopeScaling::Factors([1.0; 3].into()) };
    let error = inverse_frequencies(&rope).unwrap_err();
    assert!(matches!(error, ModelError::Config { name: "rope factors", got: 3, .. }), "{error}");
}
