//! Recorded GPUs, for tests.

use super::Gpu;
use super::device::CudaDevice;
use super::driver::command::{Arguments, Product};
use super::driver::recorder::{Note, Recorder};
use super::driver::{Address, Command, Stream};
use super::{CudaConfig, CudaError, open_with};
use crate::numerics::{Half, TensorCore};
use std::sync::Arc;

/// Device memory of [`recorded`].
const MEMORY: usize = 256 << 20;

/// A recorded GPU of this class with 256 MiB of memory: a [`CudaDevice`] over a driver that runs every kernel's host twin, late.
pub fn recorded(cores: TensorCore, half: Half) -> Arc<CudaDevice> {
    recording(cores, half, MEMORY).0
}

/// A recorded GPU with so many bytes of memory, and what it notes.
///
/// # Panics
/// If that is too little for a loader.
pub fn recording(cores: TensorCore, half: Half, memory: usize) -> (Arc<CudaDevice>, Recording) {
    let driver = Recorder::new(cores, half, memory);
    let device = CudaDevice::with_driver(driver.clone(), half).expect("a recorder has memory for a loader");
    (device, Recording(driver))
}

/// As [`open`](super::open), where the driver's GPU is a recorded one that says it is `gpu`.
///
/// # Errors
/// As [`open`](super::open).
pub fn open_recorded(config: &CudaConfig, gpu: Gpu) -> Result<Arc<CudaDevice>, CudaError> {
    open_with(config, |images| Ok(Recorder::open(gpu, config.half, images)?))
}

/// What a recorded GPU was given.
#[derive(Clone, Debug)]
pub struct Recording(Arc<Recorder>);

impl Recording {
    /// What the newest program was given since the last call, one line each. Its pool has a stream of its own, which is left out.
    pub fn take(&self) -> Vec<String> {
        let notes = self.0.take_notes();
        let of_program = |stream: &Stream| self.0.is_of_program(*stream);
        let line = |note: Note| match note {
            Note::Enqueued(stream, command) => of_program(&stream).then(|| said(&command)),
            Note::Recorded(stream) => of_program(&stream).then(|| "event".to_owned()),
            Note::Made(commands) => Some(format!("make a graph of {}", commands.len())),
            Note::Waited => Some("wait".to_owned()),
        };
        notes.into_iter().filter_map(line).collect()
    }

    /// From here on, kernels can't be enqueued, or can again.
    pub fn refuse_launches(&self, refuse: bool) {
        self.0.refuse_launches(refuse);
    }

    /// A NIC reads device memory from this address on ([`baton_memory::PoolMemory::dma_address`]).
    ///
    /// # Panics
    /// If the bytes are not of one allocation.
    pub fn read_by_nic(&self, address: u64, len: usize) -> Vec<u8> {
        self.0.read_by_nic(Address(address), len)
    }

    /// A NIC writes device memory by itself. Neither kernels nor copies see it before the device is told to show remote writes.
    ///
    /// # Panics
    /// As [`Recording::read_by_nic`].
    pub fn write_by_nic(&self, address: u64, bytes: &[u8]) {
        self.0.write_by_nic(Address(address), bytes);
    }

    /// Bytes of device memory that are allocated.
    pub fn allocated(&self) -> usize {
        self.0.allocated()
    }
}

fn said(command: &Command) -> String {
    match command {
        Command::Upload { bytes, .. } => format!("upload {bytes}"),
        Command::Download { bytes, .. } => format!("download {bytes}"),
        Command::Clear { bytes, .. } => format!("clear {bytes}"),
        Command::Graph(_) => "graph".to_owned(),
        Command::Product(Product { product, by, .. }) => {
            format!("product by {} {} x {} x {}", by.id, product.m, product.n, product.k)
        }
        Command::Launch(launch) => {
            let [x, y, z] = launch.grid;
            let more = match &launch.arguments {
                Arguments::Gemm(a) => format!(" {} x {} x {}", a.m, a.n, a.k),
                Arguments::Scatter(a) => format!(" {} entries", a.count),
                Arguments::AttendDecode(a) => format!(" {} rows, {} splits", a.rows, a.splits),
                _ => String::new(),
            };
            format!("{} [{x}, {y}, {z}]{more}", launch.kernel)
        }
    }
}
