//! Every height and width of a GEMM tile, each with the bits of the scalar reference and no store outside of its features.

mod common;

use baton_kernels::cpu::SimdLevel;
use baton_kernels::host::Store;
use baton_kernels::numerics::Numerics;
use baton_types::Dtype;
use common::{Kernels, Random, cpu, reference};

/// Over twice the tallest tile, so that rows come in one, two and three tiles of every height.
const ROWS_MAX: usize = 13;
/// Two whole panels of 16 features and the first of a third, so that each feature is once the last of a row.
const FEATURES_MAX: usize = 33;
/// K, and its partitions: one slab, a whole slab and a ragged one, and several partitions.
const DEPTHS: [(usize, usize); 3] = [(7, 1), (257, 1), (1032, 4)];
/// What stands in the output before: what is not stored stays, and what is added to shows.
const BEFORE: f32 = 3.25;

/// What a backend makes of the products of `rows` rows with each number of features: all rows of the output, the one behind the last
/// included, which is nobody's.
fn products(kernels: &dyn Kernels, (k, partitions): (usize, usize), store: Store) -> Vec<Vec<Vec<u32>>> {
    let mut random = Random(k as u64);
    let (x, all) = (random.floats(ROWS_MAX * k, 1.0), random.floats(FEATURES_MAX * k, 0.2));
    let by_features = |n: usize| {
        let weight = kernels.pack(n, k, &all[..n * k]);
        let by_rows = |rows: usize| {
            let mut data = vec![BEFORE; (ROWS_MAX + 1) * n];
            kernels.linear(&x[..rows * k], &weight, partitions, store, &mut data[..rows * n]);
            data.into_iter().map(f32::to_bits).collect()
        };
        (1..=ROWS_MAX).map(by_rows).collect()
    };
    (1..=FEATURES_MAX).map(by_features).collect()
}

#[test]
fn every_tile_has_the_bits_of_the_reference() {
    let levels = [(SimdLevel::Avx2Fma, 1), (SimdLevel::Avx2Fma, 3), (SimdLevel::Portable, 1)];
    for depth in DEPTHS {
        for (dtype, store) in [(Dtype::Bf16, Store::Set), (Dtype::F32, Store::Add)] {
            let want = products(&*reference(Numerics::F32Fma { weights: dtype }), depth, store);
            for (level, threads) in levels {
                let Some(kernels) = cpu(threads, level, Numerics::F32Fma { weights: dtype }) else { continue };
                let got = products(&*kernels, depth, store);
                let differs = |&(n, rows): &(usize, usize)| got[n - 1][rows - 1] != want[n - 1][rows - 1];
                let tiles = (1..=FEATURES_MAX).flat_map(|n| (1..=ROWS_MAX).map(move |rows| (n, rows)));
                let differing: Vec<_> = tiles.filter(differs).collect();
                assert!(
                    differing.is_empty(),
                    "{level:?}, K {depth:?}, {dtype:?}, {store:?}: (features, rows) {differing:?}"
                );
            }
        }
    }
}
