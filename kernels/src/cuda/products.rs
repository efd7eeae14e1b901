//! Products of many rows by a vendor's library, where its bits are those of the class.
//!
//! A library may divide K as it likes, and say so or not. So an algorithm is pinned for each matrix and epilogue, and only after its results
//! were compared with those of our kernels, for several numbers of rows, on inputs that show another order of sums.

use super::arguments::model::{Gemm, epilogue};
use super::arguments::{In, Out};
use super::driver::command::Product;
use super::driver::{Address, Algorithm, Buffer, Command, Copies, Driver, Purpose};
use super::launch::{FEW_ROWS, Launcher};
use super::ops::Matrix;
use crate::device::DeviceError;
use crate::numerics::tensor_core::inputs::Kind;
use crate::random::Random;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Rows of the products that are compared.
const ROWS: [usize; 5] = [1, 17, 64, 257, 2048];

/// Algorithms of one matrix that are tried.
const TRIED: usize = 8;

/// Distinct rows of an operand; the others repeat them. No tile has a multiple of so many.
const DISTINCT: usize = 61;

/// Bytes that are compared at once.
const PIECE: usize = 8 << 20;

/// A matrix and what is done with its product.
type Key = (usize, usize, i32);

/// The algorithm of each matrix and epilogue that has one.
#[derive(Debug, Default)]
pub(super) struct Pins(HashMap<Key, Algorithm>);

impl Pins {
    /// The product as a command: by a pinned algorithm where there is one, else by our kernels.
    pub(super) fn command(&self, launcher: Launcher, product: Gemm) -> Command {
        match self.pinned(&product) {
            Some(by) => Command::Product(Product { product, by, pinned: true }),
            None => Command::Launch(launcher.gemm(product)),
        }
    }

    /// The algorithm for a product, if its rows are many.
    pub(super) fn pinned(&self, product: &Gemm) -> Option<Algorithm> {
        let key = (product.n as usize, product.k as usize, product.epilogue);
        // The library adds a bias in another format.
        self.0.get(&key).copied().filter(|_| product.m as usize > FEW_ROWS && product.bias == In::null())
    }

    /// Pins what is exact, for products of up to `rows_max` rows.
    pub(super) fn choose(
        driver: &Arc<dyn Driver>,
        launcher: Launcher,
        products: impl IntoIterator<Item = (Matrix, i32)>,
        rows_max: usize,
    ) -> Result<Self, DeviceError> {
        let mut pins = Self::default();
        if rows_max <= FEW_ROWS {
            return Ok(pins);
        }
        let keys: BTreeSet<Key> =
            products.into_iter().map(|(matrix, epilogue)| (matrix.n, matrix.k, epilogue)).collect();
        let distinct = keys.iter().map(|(n, k, _)| DISTINCT * n.max(k) * 4).max().unwrap_or(0);
        let copies = Copies::new(driver, Purpose::Copies, PIECE.max(distinct))?;
        for key in keys {
            if let Some(by) = Trial::run(driver, &copies, launcher, key, rows_max)? {
                pins.0.insert(key, by);
            }
        }
        Ok(pins)
    }
}

/// Operands that show an order of sums, and two results to compare.
struct Trial<'a> {
    copies: &'a Copies,
    launcher: Launcher,
    product: Gemm,
    /// Bytes of a row of the result.
    row: usize,
}

impl<'a> Trial<'a> {
    /// The first algorithm whose results are ours, if any is.
    fn run(
        driver: &Arc<dyn Driver>,
        copies: &'a Copies,
        launcher: Launcher,
        (n, k, epilogue): Key,
        rows_max: usize,
    ) -> Result<Option<Algorithm>, DeviceError> {
        let product = Gemm {
            x: In::null(),
            w: In::null(),
            bias: In::null(),
            out: Out::at(Address(0)),
            m: rows_max as i32,
            n: n as i32,
            k: k as i32,
            epilogue,
        };
        let tried: Vec<Algorithm> =
            driver.algorithms(&product)?.into_iter().filter(|by| !by.divides_k).take(TRIED).collect();
        let rows_max = rows_max.min(ROWS[ROWS.len() - 1]);
        if tried.is_empty() {
            return Ok(None);
        }
        let row = n * if epilogue == epilogue::STORE_HALF { 2 } else { 4 };
        let what = "the trial of a library's product";
        let x = Buffer::new(driver, rows_max * k * 2, what)?;
        let w = Buffer::new(driver, n * k * 2, what)?;
        let results = [Buffer::new(driver, rows_max * row, what)?, Buffer::new(driver, rows_max * row, what)?];
        let product = Gemm { x: In::at(x.at()), w: In::at(w.at()), ..product };
        let trial = Trial { copies, launcher, product, row };
        let mut random = Random(3);
        trial.fill(&mut random, x.at(), rows_max, true)?;
        trial.fill(&mut random, w.at(), n, false)?;
        for by in tried {
            if trial.is_exact(by, results.each_ref().map(Buffer::at), rows_max)? {
                tracing::info!(n, k, algorithm = by.id, "pinned an algorithm of the library for prompts");
                return Ok(Some(by));
            }
        }
        tracing::info!(
            n,
            k,
            "no algorithm of the library has the bits of the class: prompts take Baton's own products"
        );
        Ok(None)
    }

    /// Rows of an operand. The second half of a row of W repeats the first, backwards; of every other row of X it is the negative of that. So
    /// these products are nothing but what rounding leaves of them, and an output of 16 bits shows the order of sums too.
    fn fill(&self, random: &mut Random, at: Address, rows: usize, left: bool) -> Result<(), DeviceError> {
        const SIGN: u16 = 0x8000;
        let (half, k) = (self.launcher.half, self.product.k as usize);
        let mut bytes = Vec::with_capacity(DISTINCT * k * 2);
        for row in 0..DISTINCT {
            let mut numbers = Kind::WideExponents.operands(random, half, k, left);
            let sign = if left { SIGN } else { 0 };
            if !left || row % 2 == 0 {
                (0..k / 2).for_each(|i| numbers[k - 1 - i] = numbers[i] ^ sign);
            }
            bytes.extend(numbers.into_iter().flat_map(u16::to_ne_bytes));
        }
        self.copies.repeat(&bytes, at, rows * k * 2)
    }

    fn is_exact(&self, by: Algorithm, results: [Address; 2], rows_max: usize) -> Result<bool, DeviceError> {
        let mut random = Random(4);
        let before: Vec<u8> =
            (0..DISTINCT * self.row / 4).flat_map(|_| (random.next() as u16 as f32).to_ne_bytes()).collect();
        let counts = ROWS.into_iter().filter(|rows| *rows < rows_max).chain([rows_max]);
        for rows in counts {
            for result in results {
                self.copies.repeat(&before, result, rows * self.row)?;
            }
            let product = Gemm { m: rows as i32, ..self.product };
            let ours = self.launcher.gemm(Gemm { out: Out::at(results[0]), ..product });
            self.copies.enqueue(&Command::Launch(ours))?;
            let theirs = Product { product: Gemm { out: Out::at(results[1]), ..product }, by, pinned: false };
            // Some algorithms refuse some shapes.
            if self.copies.enqueue(&Command::Product(theirs)).is_err() {
                return Ok(false);
            }
            if !self.equal(results, rows * self.row)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn equal(&self, results: [Address; 2], len: usize) -> Result<bool, DeviceError> {
        for first in (0..len).step_by(PIECE) {
            let bytes = PIECE.min(len - first);
            let [ours, theirs] =
                [self.copies.load(results[0].plus(first), bytes)?, self.copies.load(results[1].plus(first), bytes)?];
            if ours != theirs {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::recorder::Recorder;
    use crate::cuda::driver::recorder::library::{DIVIDES, DIVIDES_MANY, DIVIDES_SILENTLY, EXACT};
    use crate::numerics::{Half, TensorCore};

    fn pinned(algorithms: &[Algorithm], cores: TensorCore, half: Half, epilogue: i32, rows_max: usize) -> Option<u32> {
        let driver: Arc<dyn Driver> = Recorder::with_library(cores, half, 16 << 20, algorithms);
        let launcher = Launcher { half, processors: 4 };
        let (n, k) = (40, 96);
        let matrix = Matrix { at: Address(0), n, k };
        let pins = Pins::choose(&driver, launcher, [(matrix, epilogue)], rows_max).unwrap();
        pins.0.get(&(n, k, epilogue)).map(|by| by.id)
    }

    #[test]
    fn an_algorithm_is_pinned_if_its_bits_are_ours() {
        for (cores, half) in [(TensorCore::Tc16F25, Half::Bf16), (TensorCore::Tc8F24, Half::F16)] {
            for epilogue in [epilogue::STORE_HALF, epilogue::ADD_RESIDUAL] {
                let pinned = |algorithms: &[Algorithm], rows_max| pinned(algorithms, cores, half, epilogue, rows_max);
                assert_eq!(pinned(&[DIVIDES, DIVIDES_SILENTLY, EXACT], 300), Some(EXACT.id));
                assert_eq!(pinned(&[DIVIDES_SILENTLY], 300), None, "what divides K has other bits");
                assert_eq!(pinned(&[DIVIDES_MANY], 300), None, "what divides K for some rows has other bits there");
                assert_eq!(pinned(&[Algorithm { divides_k: true, ..EXACT }], 300), None, "it says so");
                assert_eq!(pinned(&[], 300), None);
                assert_eq!(pinned(&[EXACT], FEW_ROWS), None, "few rows never take it");
            }
        }
    }

    #[test]
    fn few_rows_and_biases_take_our_kernels() {
        let pins = Pins(HashMap::from([((40, 96, epilogue::STORE_HALF), EXACT)]));
        let launcher = Launcher { half: Half::Bf16, processors: 4 };
        let product = Gemm {
            x: In::null(),
            w: In::null(),
            bias: In::null(),
            out: Out::at(Address(0)),
            m: FEW_ROWS as i32 + 1,
            n: 40,
            k: 96,
            epilogue: epilogue::STORE_HALF,
        };
        let is_library = |product| matches!(pins.command(launcher, product), Command::Product(_));
        assert!(is_library(product));
        assert!(!is_library(Gemm { m: FEW_ROWS as i32, ..product }));
        assert!(!is_library(Gemm { bias: In::at(Address(256)), ..product }));
        assert!(!is_library(Gemm { epilogue: epilogue::ADD_RESIDUAL, ..product }));
    }
}
