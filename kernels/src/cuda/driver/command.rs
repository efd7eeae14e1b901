//! Commands of a stream.

use super::{Address, Pinned};
use crate::cuda::arguments::Argument;
use crate::cuda::arguments::known::{KnownCases, KnownTiles};
use crate::cuda::arguments::model::{Attend, Embed, Gemm, RmsNorm, RopeStore, Select, SiluMul};
use crate::cuda::arguments::pool::{CopyRows, SumRows};
use crate::cuda::arguments::sampling::{ClearCounts, CountTokens, Sample, Scatter};
use std::sync::Arc;

/// A graph of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GraphId(pub(crate) u32);

/// What a stream does.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// Host to device.
    Upload { from: Arc<dyn Pinned>, offset: usize, to: Address, bytes: usize },
    /// Device to host.
    Download { from: Address, to: Arc<dyn Pinned>, offset: usize, bytes: usize },
    /// Zeros.
    Clear { at: Address, bytes: usize },
    /// A kernel.
    Launch(Launch),
    /// A product by a vendor's library.
    Product(Product),
    /// All commands of a graph.
    Graph(GraphId),
}

impl From<Launch> for Command {
    fn from(launch: Launch) -> Self {
        Self::Launch(launch)
    }
}

/// A kernel with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launch {
    /// Its name in the cubin.
    pub(crate) kernel: String,
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) block: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    pub(crate) arguments: Arguments,
}

/// A product by a vendor's library: as our kernels compute it, without a bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) product: Gemm,
    pub(crate) by: Algorithm,
    /// Whether its bits are known to be the class's.
    pub(crate) pinned: bool,
}

/// How a library computes a product. What it says of itself is no proof of its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Algorithm {
    /// The library's own description.
    pub(crate) words: [u64; 8],
    /// The library's number for the family.
    pub(crate) id: u32,
    /// Whether it says that it divides K, or does not say that it leaves K whole.
    pub(crate) divides_k: bool,
}

/// The arguments of a kernel.
#[allow(missing_docs, reason = "the names of the kernels")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arguments {
    Embed(Embed),
    RmsNorm(RmsNorm),
    Gemm(Gemm),
    RopeStore(RopeStore),
    AttendPrefill(Attend),
    AttendDecode(Attend),
    AttendMerge(Attend),
    SiluMul(SiluMul),
    Select(Select),
    Sample(Sample),
    Scatter(Scatter),
    ClearCounts(ClearCounts),
    CountTokens(CountTokens),
    CopyRows(CopyRows),
    SumRows(SumRows),
    KnownTiles(KnownTiles),
    KnownCases(KnownCases),
}

impl Arguments {
    /// As the kernel takes them.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Embed(a) => a.append(&mut bytes),
            Self::RmsNorm(a) => a.append(&mut bytes),
            Self::Gemm(a) => a.append(&mut bytes),
            Self::RopeStore(a) => a.append(&mut bytes),
            Self::AttendPrefill(a) | Self::AttendDecode(a) | Self::AttendMerge(a) => a.append(&mut bytes),
            Self::SiluMul(a) => a.append(&mut bytes),
            Self::Select(a) => a.append(&mut bytes),
            Self::Sample(a) => a.append(&mut bytes),
            Self::Scatter(a) => a.append(&mut bytes),
            Self::ClearCounts(a) => a.append(&mut bytes),
            Self::CountTokens(a) => a.append(&mut bytes),
            Self::CopyRows(a) => a.append(&mut bytes),
            Self::SumRows(a) => a.append(&mut bytes),
            Self::KnownTiles(a) => a.append(&mut bytes),
            Self::KnownCases(a) => a.append(&mut bytes),
        }
        bytes
    }
}
