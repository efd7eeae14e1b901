//! How KV moves, from where the pool is and what UCX opened.

use super::lanes::{self, Lane};
use baton_types::MemoryKind;

/// How KV moves between this pool and those of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataPath {
    /// The pool is host memory and is registered. Each connection puts where its lanes are one-sided, and sends messages from the pool
    /// elsewhere.
    ByLanes,
    /// GPUDirect: the NIC reads and writes device memory, which is registered with its memory type. Puts go over lanes that are `rc` alone.
    /// Not taken yet: no pool of CUDA memory exists.
    DirectPuts,
    /// The sink reads the pool of the source, and nobody puts into a pool. Not taken yet: no pool of CUDA memory exists.
    ///
    /// Over `ud`, UCX emulates a get by messages of the owner. UCX 1.22 may abort the owner's process if the reader is gone by then
    /// (`ucp_request_try_send`). So a connection must look at its lanes before it reads by them.
    Gets,
    /// The pool is not registered. Bytes pass through buffers of the host, bounded for each connection, and go out as messages.
    Staged,
}

impl DataPath {
    /// The path for a pool of this kind over these transports, such as `rc_mlx5`; none stand for Baton's TCP. `supported` says whether UCX
    /// moves memory of this kind ([`crate::ucx::Context::supports`]).
    pub(super) fn of<S: AsRef<str>>(pool: MemoryKind, transports: &[S], supported: bool) -> Self {
        let opened = |lane| transports.iter().any(|transport| Lane::of(transport.as_ref()) == lane);
        match pool {
            MemoryKind::Host => Self::ByLanes,
            MemoryKind::Remote => Self::Staged,
            MemoryKind::Cuda(_) if !supported => Self::Staged,
            // Before `rc`: where both processes are on one host, UCX would put by it, and such puts have no fence.
            MemoryKind::Cuda(_) if opened(Lane::CudaIpc) => Self::Gets,
            MemoryKind::Cuda(_) if opened(Lane::Rc) => Self::DirectPuts,
            MemoryKind::Cuda(_) if opened(Lane::Dc) || opened(Lane::Ud) => Self::Gets,
            MemoryKind::Cuda(_) => Self::Staged,
        }
    }

    /// Whether UCX registers the pool, so that peers get a key.
    pub(super) fn registers(self) -> bool {
        match self {
            Self::ByLanes | Self::DirectPuts | Self::Gets => true,
            Self::Staged => false,
        }
    }

    /// Whether a connection over an endpoint with these lanes, such as `rc_mlx5/mlx5_0:1`, writes by UCX's puts.
    pub(super) fn puts_over(self, lanes: &[String]) -> bool {
        match self {
            Self::ByLanes => lanes::write_by_themselves(lanes),
            Self::DirectPuts => lanes::are_rc(lanes),
            Self::Gets | Self::Staged => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DataPath::{ByLanes, DirectPuts, Gets, Staged};
    use super::*;
    use MemoryKind::{Cuda, Host, Remote};

    #[test]
    fn kv_takes_the_path_that_memory_and_lanes_allow() {
        let (supported, not_supported) = (true, false);
        let cases: [(MemoryKind, &str, bool, DataPath, &str); 24] = [
            (Host, "", supported, ByLanes, "sockets send host memory from where it is"),
            (Host, "posix self sysv", supported, ByLanes, "messages from the pool"),
            (Host, "rc_mlx5 ud_mlx5", supported, ByLanes, "puts over rc"),
            (Host, "dc_mlx5 ud_mlx5", supported, ByLanes, "puts over dc"),
            (Host, "cuda_copy rc_mlx5 ud_mlx5", supported, ByLanes, "a CUDA-aware UCX changes nothing for host memory"),
            (Host, "cuda_copy cuda_ipc rc_mlx5", supported, ByLanes, "cuda_ipc moves device memory alone"),
            (Remote, "", not_supported, Staged, "it has no address, for sockets"),
            (Remote, "posix self sysv", not_supported, Staged, "it has no address, for messages"),
            (Remote, "cuda_copy rc_mlx5", not_supported, Staged, "it has no address, for a NIC"),
            (Remote, "cuda_copy cuda_ipc rc_mlx5", supported, Staged, "it is no memory of CUDA"),
            (Cuda(0), "", not_supported, Staged, "Baton's TCP always stages"),
            (Cuda(0), "rc_mlx5 ud_mlx5", not_supported, Staged, "UCX knows CUDA memory by cuda_copy alone"),
            (Cuda(0), "posix self sysv", not_supported, Staged, "a UCX without CUDA"),
            (Cuda(0), "cuda_copy rc_mlx5 rc_verbs ud_mlx5", supported, DirectPuts, "GPUDirect"),
            (Cuda(7), "cuda_copy rc_verbs", supported, DirectPuts, "GPUDirect, of any device"),
            (Cuda(0), "cuda_copy gdr_copy rc_mlx5", supported, DirectPuts, "gdr_copy is a local copy"),
            (
                Cuda(0),
                "cuda_copy dc_mlx5 rc_mlx5 ud_mlx5",
                supported,
                DirectPuts,
                "rc is there, for endpoints that get it",
            ),
            (Cuda(0), "cuda_copy dc_mlx5 ud_mlx5", supported, Gets, "a closed endpoint of dc fences no foreign write"),
            (Cuda(0), "cuda_copy ud_mlx5", supported, Gets, "UCX would emulate puts over ud"),
            (Cuda(0), "cuda_copy cuda_ipc posix sysv", supported, Gets, "puts over cuda_ipc have no fence"),
            (Cuda(0), "cuda_copy cuda_ipc rc_mlx5", supported, Gets, "on one host UCX would put over cuda_ipc"),
            (Cuda(0), "cuda_ipc rc_mlx5", not_supported, Staged, "cuda_ipc without cuda_copy detects no memory"),
            (Cuda(0), "cuda_copy posix self sysv", supported, Staged, "UCX would copy by progress of the target"),
            (Cuda(0), "cma cuda_copy posix", supported, Staged, "cma moves host memory alone"),
        ];
        for (pool, transports, supported, expected, reason) in cases {
            let transports: Vec<&str> = transports.split_whitespace().collect();
            assert_eq!(DataPath::of(pool, &transports, supported), expected, "{pool} over {transports:?}: {reason}");
        }
    }

    #[test]
    fn a_connection_puts_where_path_and_lanes_allow() {
        // Lanes of an endpoint, and whether each path puts over them: by lanes, direct puts.
        let cases = [
            ("rc_mlx5/mlx5_0:1", [true, true]),
            ("cuda_copy/cuda rc_mlx5/mlx5_0:1", [true, true]),
            ("dc_mlx5/mlx5_0:1", [true, false]),
            ("dc_mlx5/mlx5_0:1 rc_mlx5/mlx5_0:1", [true, false]),
            ("cuda_ipc/cuda rc_mlx5/mlx5_0:1", [false, false]),
            ("ud_mlx5/mlx5_0:1", [false, false]),
            ("posix/memory sysv/memory", [false, false]),
            ("cuda_copy/cuda", [false, false]),
            ("", [false, false]),
        ];
        for (lanes, expected) in cases {
            let lanes: Vec<String> = lanes.split_whitespace().map(Into::into).collect();
            let puts = [ByLanes, DirectPuts, Gets, Staged].map(|path| path.puts_over(&lanes));
            assert_eq!(puts, [expected[0], expected[1], false, false], "{lanes:?}");
        }
    }

    #[test]
    fn only_staged_pools_are_not_registered() {
        assert_eq!([ByLanes, DirectPuts, Gets, Staged].map(DataPath::registers), [true, true, true, false]);
    }
}
