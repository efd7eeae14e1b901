//! Known answers: a GPU computes a class only if its instructions give the bits of the class's scalar twins. Checked when it is opened.

mod cases;
mod tiles;

use super::CudaError;
use super::driver::command::Arguments;
use super::driver::{Address, Buffer, Copies, Driver, Launch, Purpose};
use crate::device::DeviceError;
use crate::numerics::{Half, TensorCore};
use cases::Cases;
#[cfg(any(test, feature = "testing"))]
pub(super) use cases::{OPERATIONS, answer};
use std::sync::Arc;
use tiles::Tiles;

/// Refuses a GPU one of whose instructions has other bits than the class.
pub(super) fn check(driver: &Arc<dyn Driver>, cores: TensorCore, half: Half) -> Result<(), CudaError> {
    let mut run = Run::new(driver)?;
    let cases = Cases::new();
    let wrong = match cases.first_wrong(&mut run)? {
        Some(operation) => Some(operation),
        None => Tiles::new(cores, half).wrong(&mut run, half)?.then_some("the dot product of its tensor cores"),
    };
    match wrong {
        Some(of) => Err(CudaError::KnownAnswers { name: driver.gpu().name.clone(), of, class: cores.name() }),
        None => Ok(()),
    }
}

/// Bytes that are copied at once: all operands of a kernel.
const PIECE: usize = 256 << 10;

/// Runs kernels one at a time.
struct Run<'a> {
    driver: &'a Arc<dyn Driver>,
    copies: Copies,
}

impl<'a> Run<'a> {
    fn new(driver: &'a Arc<dyn Driver>) -> Result<Self, DeviceError> {
        Ok(Self { driver, copies: Copies::new(driver, Purpose::Copies, PIECE)? })
    }

    /// What a kernel writes, `bytes` bytes. `arguments` gets the addresses of `operands`, and behind them that of the result.
    fn run(
        &mut self,
        kernel: String,
        blocks: u32,
        threads: u32,
        operands: &[Vec<u8>],
        bytes: usize,
        arguments: impl FnOnce(&[Address]) -> Arguments,
    ) -> Result<Vec<u8>, DeviceError> {
        let mut buffers = Vec::new();
        for operand in operands {
            let buffer = Buffer::new(self.driver, operand.len(), "known answers")?;
            self.copies.store(buffer.at(), operand)?;
            buffers.push(buffer);
        }
        let result = Buffer::new(self.driver, bytes, "known answers")?;
        let addresses: Vec<Address> = buffers.iter().chain([&result]).map(Buffer::at).collect();
        let grid = [blocks, 1, 1];
        let launch = Launch { kernel, grid, block: threads, shared: 0, arguments: arguments(&addresses) };
        self.copies.enqueue(&launch.into())?;
        self.copies.load(result.at(), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::recorder::Recorder;
    use cases::Operation;

    #[test]
    fn another_dot_product_is_refused() {
        for (cores, other) in [(TensorCore::Tc16F25, TensorCore::Tc8F24), (TensorCore::Tc8F24, TensorCore::Tc16F25)] {
            for half in [Half::Bf16, Half::F16] {
                let driver: Arc<dyn Driver> = Recorder::new(cores, half, 16 << 20);
                assert_eq!(check(&driver, cores, half), Ok(()));
                let refused = check(&driver, other, half).unwrap_err().to_string();
                assert!(refused.contains(other.name()) && refused.contains("dot product"), "{refused}");
            }
        }
    }

    #[test]
    fn one_wrong_bit_of_any_operation_is_found() {
        let driver: Arc<dyn Driver> = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 16 << 20);
        let mut run = Run::new(&driver).unwrap();
        let cases = Cases::new();
        assert_eq!(cases.first_wrong(&mut run).unwrap(), None);
        for (operation, Operation { name, .. }) in OPERATIONS.iter().enumerate() {
            let mut expected = Cases::new();
            expected.falsify(operation);
            assert_eq!(expected.first_wrong(&mut run).unwrap(), Some(*name));
        }
    }
}
