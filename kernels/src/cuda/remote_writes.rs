//! How bytes that a NIC stores in device memory by itself become visible to the device.

/// What a device and its driver promise of GPUDirect RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteWrites {
    /// No NIC may reach device memory, or nothing makes visible what it stored.
    Unsupported,
    /// Kernels and copies that start later see them.
    Ordered,
    /// They do after a flush by the host.
    Flushed,
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: from here on the device itself needs no flush.
const ORDERED_FOR_OWNER: i32 = 100;

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`: `cuFlushGPUDirectRDMAWrites` works.
const BY_HOST: i32 = 1;

impl RemoteWrites {
    /// From the values of the attributes `GPU_DIRECT_RDMA_SUPPORTED`, `GPU_DIRECT_RDMA_WRITES_ORDERING` and
    /// `GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS` (CUDA driver API, `CUdevice_attribute`).
    pub(crate) const fn of(supported: i32, ordering: i32, flush_options: i32) -> Self {
        if supported == 0 {
            return Self::Unsupported;
        }
        if ordering >= ORDERED_FOR_OWNER {
            return Self::Ordered;
        }
        if flush_options & BY_HOST != 0 { Self::Flushed } else { Self::Unsupported }
    }
}

#[cfg(test)]
mod tests {
    use super::RemoteWrites::{self, Flushed, Ordered, Unsupported};

    #[test]
    fn what_needs_a_flush_gets_one_or_is_refused() {
        // Supported, ordering, options of a flush.
        let cases = [
            ((1, 100, 1), Ordered), // An H100 and an H200, as measured: docs/gpu.md.
            ((1, 200, 0), Ordered),
            ((1, 0, 1), Flushed),
            ((1, 0, 3), Flushed),
            ((1, 0, 2), Unsupported), // By operations of a stream alone.
            ((1, 0, 0), Unsupported),
            ((0, 100, 1), Unsupported),
            ((0, 0, 0), Unsupported),
        ];
        for (attributes, expected) in cases {
            let (supported, ordering, options) = attributes;
            assert_eq!(RemoteWrites::of(supported, ordering, options), expected, "{attributes:?}");
        }
    }
}
