//! Known answers: a GPU computes a class only if its tensor cores give the bits of the class's scalar twin.

use super::CudaError;
use super::arguments::known::KnownTiles;
use super::arguments::{In, Out};
use super::driver::command::Arguments;
use super::driver::{Buffer, Command, Driver, Launch, Purpose};
use crate::device::DeviceError;
use crate::numerics::tensor_core::inputs::{Kind, Random};
use crate::numerics::{Half, TensorCore};
use std::sync::Arc;

/// Rows and columns of a tile.
const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// Products of one result: two steps of the wider class.
const K: usize = 32;

/// Tiles of each kind of inputs. The twin takes two milliseconds for all of them.
const TILES: usize = 4;

/// The dot products of tiles, and what the class says of them.
struct Tiles {
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<f32>,
    answers: Vec<u32>,
}

impl Tiles {
    fn new(cores: TensorCore, half: Half) -> Self {
        let mut random = Random(1);
        let mut all = Self { a: Vec::new(), b: Vec::new(), c: Vec::new(), answers: Vec::new() };
        for kind in Kind::ALL.into_iter().flat_map(|kind| [kind; TILES]) {
            let a = kind.operands(&mut random, half, ROWS * K, true);
            let b = kind.operands(&mut random, half, COLUMNS * K, false);
            for (row, column) in (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column))) {
                let c = kind.accumulator(&mut random);
                let answer = cores.dot(half, c, &a[row * K..][..K], &b[column * K..][..K]);
                all.c.push(c);
                all.answers.push(answer.to_bits());
            }
            all.a.extend(a);
            all.b.extend(b);
        }
        all
    }
}

/// Refuses a GPU whose tensor cores have other bits than the class.
pub(super) fn check(driver: &Arc<dyn Driver>, cores: TensorCore, half: Half) -> Result<(), CudaError> {
    let tiles = Tiles::new(cores, half);
    let got = run(driver, half, &tiles)?;
    let same = |(got, want): (&f32, &u32)| got.to_bits() == *want || (got.is_nan() && f32::from_bits(*want).is_nan());
    if got.iter().zip(&tiles.answers).all(same) {
        return Ok(());
    }
    let (name, of) = (driver.gpu().name.clone(), "the dot product of its tensor cores");
    Err(CudaError::KnownAnswers { name, of, class: cores.name() })
}

/// What the device makes of them.
fn run(driver: &Arc<dyn Driver>, half: Half, tiles: &Tiles) -> Result<Vec<f32>, DeviceError> {
    let halves = |x: &[u16]| x.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
    let parts = [halves(&tiles.a), halves(&tiles.b), tiles.c.iter().flat_map(|x| x.to_ne_bytes()).collect()];
    let stream = driver.stream(Purpose::Copies)?;
    let result = tiles.c.len() * size_of::<f32>();
    let host = driver.pinned(parts.iter().map(Vec::len).max().unwrap_or(0).max(result) * 4)?;
    let mut buffers = Vec::new();
    let mut offset = 0;
    for part in &parts {
        let buffer = Buffer::new(driver, part.len(), "known answers")?;
        host.store(offset, part);
        let (from, to, bytes) = (host.clone(), buffer.at(), part.len());
        driver.enqueue(stream, &Command::Upload { from, offset, to, bytes })?;
        offset += bytes;
        buffers.push(buffer);
    }
    let out = Buffer::new(driver, result, "known answers")?;
    let kernel = match half {
        Half::Bf16 => "known_mma_bf16",
        Half::F16 => "known_mma_f16",
    };
    let count = tiles.c.len() / (ROWS * COLUMNS);
    let arguments = Arguments::KnownTiles(KnownTiles {
        a: In::at(buffers[0].at()),
        b: In::at(buffers[1].at()),
        c: In::at(buffers[2].at()),
        d: Out::at(out.at()),
        tiles: count as i32,
        k: K as i32,
    });
    let launch = Launch { kernel: kernel.to_owned(), grid: [count as u32, 1, 1], block: 32, shared: 0, arguments };
    driver.enqueue(stream, &Command::Launch(launch))?;
    driver.enqueue(stream, &Command::Download { from: out.at(), to: host.clone(), offset: 0, bytes: result })?;
    let end = driver.record(stream)?;
    let waited = driver.wait(end);
    driver.forget(end);
    waited?;
    let mut bytes = vec![0; result];
    host.load(0, &mut bytes);
    Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::recorder::Recorder;

    #[test]
    fn another_arithmetic_is_refused() {
        for (cores, other) in [(TensorCore::Tc16F25, TensorCore::Tc8F24), (TensorCore::Tc8F24, TensorCore::Tc16F25)] {
            for half in [Half::Bf16, Half::F16] {
                let driver: Arc<dyn Driver> = Recorder::new(cores, half, 16 << 20);
                assert_eq!(check(&driver, cores, half), Ok(()));
                let refused = check(&driver, other, half).unwrap_err();
                assert!(refused.to_string().contains(other.name()), "{refused}");
            }
        }
    }
}
