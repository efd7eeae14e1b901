//! Every height and width of a GEMM tile, each with the bits of the scalar reference and no store outside of its features.

mod common;

use baton_kernels::cpu::SimdLevel;
use baton_kernels::host::Store;
use baton_kernels::numerics::Numerics;
use baton_types::Dtype;
use common::{Kernels, Random, cpu, reference};

/// Beside every height of a tile, rows in one, two and three of the tallest tiles.
const ROWS: [usize; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 25];
/// Two whole panels of 16 features and the first of a third, so that each feature is once the last of a row.
const FEATURES: usize = 33;
/// With few rows, 4 or 8 panels pass together: these many features, and one more panel.
const WIDE: [usize; 4] = [64, 65, 128, 129];
const FEW_ROWS: usize = 2;
/// K, and its partitions: one slab, a whole slab and a ragged one, and several partitions.
const DEPTHS: [(usize, usize); 3] = [(7, 1), (257, 1), (1032, 4)];
/// What stands in the output before: what is not stored stays, and what is added to shows.
const BEFORE: f32 = 3.25;

/// Features and rows of all products.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    let tall = (1..=FEATURES).flat_map(|n| ROWS.map(|rows| (n, rows)));
    let wide = WIDE.into_iter().flat_map(|n| (1..=FEW_ROWS).map(move |rows| (n, rows)));
    tall.chain(wide)
}

/// What a backend makes of the products of each shape: all rows of the output, the one behind the last included, which is nobody's.
fn products(kernels: &dyn Kernels, (k, partitions): (usize, usize), store: Store) -> Vec<Vec<u32>> {
    let mut random = Random(k as u64);
    let x = random.floats(ROWS.into_iter().max().unwrap() * k, 1.0);
    let all = random.floats(WIDE.into_iter().max().unwrap() * k, 0.2);
    let product = |(n, rows): (usize, usize)| {
        let weight = kernels.pack(n, k, &all[..n * k]);
        let mut data = vec![BEFORE; (rows + 1) * n];
        kernels.linear(&x[..rows * k], &weight, partitions, store, &mut data[..rows * n]);
        data.into_iter().map(f32::to_bits).collect()
    };
    shapes().map(product).collect()
}

#[test]
fn every_tile_has_the_bits_of_the_reference() {
    let levels = [(SimdLevel::Avx512, 1), (SimdLevel::Avx2Fma, 1), (SimdLevel::Avx2Fma, 3), (SimdLevel::Portable, 1)];
    for depth in DEPTHS {
        for (dtype, store) in [(Dtype::Bf16, Store::Set), (Dtype::F32, Store::Add)] {
            let want = products(&*reference(Numerics::F32Fma { weights: dtype }), depth, store);
            for (level, threads) in levels {
                let Some(kernels) = cpu(threads, level, Numerics::F32Fma { weights: dtype }) else { continue };
                let got = products(&*kernels, depth, store);
                let results = shapes().zip(got.iter().zip(&want));
                let differing: Vec<_> =
                    results.filter(|(_, (got, want))| got != want).map(|(shape, _)| shape).collect();
                assert!(
                    differing.is_empty(),
                    "{level:?}, K {depth:?}, {dtype:?}, {store:?}: (features, rows) {differing:?}"
                );
            }
        }
    }
}
