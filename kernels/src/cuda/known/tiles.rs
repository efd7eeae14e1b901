//! The dot product of tensor cores.

use super::Run;
use crate::cuda::arguments::known::KnownTiles;
use crate::cuda::arguments::{In, Out, bytes_of};
use crate::cuda::driver::command::Arguments;
use crate::device::DeviceError;
use crate::numerics::tensor_core::inputs::Kind;
use crate::numerics::{Half, TensorCore};
use crate::random::Random;

/// Rows and columns of a tile.
const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// Products of one result: two steps of the wider class.
const K: usize = 32;

/// Tiles of each kind of inputs. The twin takes two milliseconds for all of them.
const TILES: usize = 4;

/// Operands of tiles, and what the class says of them.
pub(super) struct Tiles {
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<f32>,
    answers: Vec<f32>,
}

impl Tiles {
    pub(super) fn new(cores: TensorCore, half: Half) -> Self {
        let mut random = Random(1);
        let mut all = Self { a: Vec::new(), b: Vec::new(), c: Vec::new(), answers: Vec::new() };
        for kind in Kind::ALL.into_iter().flat_map(|kind| [kind; TILES]) {
            let a = kind.operands(&mut random, half, ROWS * K, true);
            let b = kind.operands(&mut random, half, COLUMNS * K, false);
            for (row, column) in (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column))) {
                let c = kind.accumulator(&mut random);
                all.c.push(c);
                all.answers.push(cores.dot(half, c, &a[row * K..][..K], &b[column * K..][..K]));
            }
            all.a.extend(a);
            all.b.extend(b);
        }
        all
    }

    /// Whether the device has other bits. All NaNs are one.
    pub(super) fn wrong(&self, run: &mut Run<'_>, half: Half) -> Result<bool, DeviceError> {
        let kernel = match half {
            Half::Bf16 => "known_mma_bf16",
            Half::F16 => "known_mma_f16",
        };
        let tiles = self.c.len() / (ROWS * COLUMNS);
        let halves = |x: &[u16]| x.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
        let operands = [halves(&self.a), halves(&self.b), bytes_of(&self.c)];
        let arguments = |at: &[_]| {
            let (a, b, c, d) = (In::at(at[0]), In::at(at[1]), In::at(at[2]), Out::at(at[3]));
            Arguments::KnownTiles(KnownTiles { a, b, c, d, tiles: tiles as i32, k: K as i32 })
        };
        let got = run.run(kernel.to_owned(), tiles as u32, 32, &operands, size_of_val(&self.c[..]), arguments)?;
        let got = got.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
        let same = |(got, want): (f32, &f32)| got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        Ok(!got.zip(&self.answers).all(same))
    }
}
