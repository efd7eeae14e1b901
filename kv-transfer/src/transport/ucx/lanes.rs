//! Properties of lanes: which of them write without the peer's processor, which are fenced by destroying the worker, and which no peer
//! reaches.
//!
//! Names are those of the transports that UCX opened. Aliases of `UCX_TLS` are resolved by then: `cuda` is `cuda_copy`, `cuda_ipc` and
//! `gdr_copy`, and `rc` brings `ud` for its connections (`ucp_tl_aliases`, UCX 1.22).

use super::data_path::DataPath;

/// What a transport is to a process and its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Reaches its own worker alone.
    Loopback,
    /// Copies between host and device memory of this process. Each opened interface has an identifier of its own, and reaches only itself
    /// (`uct_cuda_copy_iface_is_reachable_v2`), so a peer can neither send nor write by it.
    LocalCopy,
    /// The NIC writes through a queue pair of the worker, and acknowledges it, whatever happens to the processes.
    Rc,
    /// The same through a queue of the interface that the worker opened.
    Dc,
    /// The worker stores what comes, from its queues, its sockets or its receive memory. UCX's own shared memory (`posix`, `sysv`) cannot
    /// map a pool that UCX did not allocate.
    ByWorker,
    /// The same, from datagrams of a NIC.
    Ud,
    /// A process that has a key of our device memory copies from and to it, without this one.
    CudaIpc,
    /// A peer writes our memory directly (`cma`, `xpmem`, `knem`, `rocm_ipc`, `ze_ipc`).
    Foreign,
    /// Nobody has looked at how it stores: `gga_mlx5`, `rc_gda` and `srd`, which UCX's alias `ib` opens too, and those of later versions.
    Unknown,
}

impl Lane {
    /// The lane of a transport, such as `rc_mlx5`.
    pub(super) fn of(transport: &str) -> Self {
        match transport {
            "self" => Self::Loopback,
            "cuda_copy" | "gdr_copy" => Self::LocalCopy,
            "rc_verbs" | "rc_mlx5" => Self::Rc,
            "dc_mlx5" => Self::Dc,
            "ud_verbs" | "ud_mlx5" => Self::Ud,
            "tcp" | "posix" | "sysv" => Self::ByWorker,
            "cuda_ipc" => Self::CudaIpc,
            "cma" | "xpmem" | "knem" | "rocm_ipc" | "ze_ipc" => Self::Foreign,
            _ => Self::Unknown,
        }
    }

    /// The lane of an endpoint, such as `rc_mlx5/mlx5_0:1`.
    fn of_endpoint(lane: &str) -> Self {
        Self::of(lane.split('/').next().unwrap_or_default())
    }

    /// Whether nothing can arrive through it once the worker is destroyed. By `cuda_ipc` peers write whenever they put, so nothing arrives
    /// where they do not.
    fn ends_with_worker(self, path: DataPath) -> bool {
        match self {
            Self::Loopback | Self::LocalCopy | Self::Rc | Self::Dc | Self::Ud | Self::ByWorker => true,
            Self::CudaIpc => path == DataPath::Gets,
            Self::Foreign | Self::Unknown => false,
        }
    }

    /// Whether workers of two processes can be connected by it. UCX sends no messages over `cuda_ipc`: it only comes beside another lane.
    fn connects(self) -> bool {
        match self {
            Self::Rc | Self::Dc | Self::Ud | Self::ByWorker | Self::Foreign | Self::Unknown => true,
            Self::Loopback | Self::LocalCopy | Self::CudaIpc => false,
        }
    }
}

/// Lanes of these transports without the copies within this process, which are no lanes between workers.
fn without_copies(lanes: impl Iterator<Item = Lane>) -> impl Iterator<Item = Lane> {
    lanes.filter(|lane| *lane != Lane::LocalCopy)
}

/// Whether destroying the worker of a connection fences it, if KV moves on this path and its peer could reach it only by these transports.
/// An empty list does not fence.
pub(super) fn fences<S: AsRef<str>>(transports: &[S], path: DataPath) -> bool {
    let mut lanes = without_copies(transports.iter().map(|t| Lane::of(t.as_ref()))).peekable();
    lanes.peek().is_some() && lanes.all(|lane| lane.ends_with_worker(path))
}

/// Whether `cuda_ipc` is among them.
pub(super) fn have_cuda_ipc<S: AsRef<str>>(transports: &[S]) -> bool {
    transports.iter().any(|transport| Lane::of(transport.as_ref()) == Lane::CudaIpc)
}

/// Whether another process can be reached by any of these. UCX silently omits network devices that are down when it starts, and never
/// checks again.
pub(crate) fn reach_others<S: AsRef<str>>(transports: &[S]) -> bool {
    transports.iter().any(|transport| Lane::of(transport.as_ref()).connects())
}

/// Those of these transports that this version knows nothing about. A worker does not start with them.
pub(super) fn unknown<S: AsRef<str>>(transports: &[S]) -> Vec<String> {
    let unknown = transports.iter().map(AsRef::as_ref).filter(|transport| Lane::of(transport) == Lane::Unknown);
    unknown.map(ToOwned::to_owned).collect()
}

/// Whether every put over an endpoint with these lanes (such as `tcp/eth0`) is one-sided. Otherwise UCX emulates some by messages that the
/// peer's UCX must acknowledge.
pub(super) fn write_by_themselves(lanes: &[String]) -> bool {
    all_are(lanes, &[Lane::Rc, Lane::Dc])
}

/// Whether a get over an endpoint with these lanes needs nothing of the owner's process, for memory that the NICs of both sides registered.
/// Beside `cuda_ipc` there must be a lane of a NIC: UCX turns gets over `cuda_ipc` off where it finds no NVLink.
pub(super) fn read_by_themselves(lanes: &[String]) -> bool {
    let of_nic = |lane: &String| matches!(Lane::of_endpoint(lane), Lane::Rc | Lane::Dc);
    all_are(lanes, &[Lane::Rc, Lane::Dc, Lane::CudaIpc]) && lanes.iter().any(of_nic)
}

/// Whether every put over an endpoint with these lanes is one of `rc`.
pub(super) fn are_rc(lanes: &[String]) -> bool {
    all_are(lanes, &[Lane::Rc])
}

fn all_are(lanes: &[String], expected: &[Lane]) -> bool {
    let mut lanes = without_copies(lanes.iter().map(|lane| Lane::of_endpoint(lane))).peekable();
    lanes.peek().is_some() && lanes.all(|lane| expected.contains(&lane))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of `docs/decisions/0008-fencing.md`.
    #[test]
    fn only_lanes_that_end_with_the_worker_are_fenced() {
        // Transports, and whether they are fenced: where workers put or send messages, and where they only get.
        let cases: [(&[&str], [bool; 2]); 18] = [
            (&["tcp"], [true, true]),
            (&["posix", "self", "sysv", "tcp"], [true, true]),
            (&["rc_mlx5", "ud_mlx5"], [true, true]),
            (&["dc_mlx5"], [true, true]),
            (&["cma", "tcp"], [false, false]),
            (&["tcp", "xpmem"], [false, false]),
            (&["knem", "posix"], [false, false]),
            (&["tcp", "of_tomorrow"], [false, false]),
            (&[], [false, false]),
            // `rc,cuda_copy`, as the chart has it.
            (&["cuda_copy", "rc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs"], [true, true]),
            (&["cuda_copy", "gdr_copy", "rc_mlx5", "ud_mlx5"], [true, true]),
            (&["cuda_copy", "dc_mlx5", "ud_mlx5"], [true, true]),
            (&["cuda_copy", "posix", "self", "sysv"], [true, true]),
            (&["cuda_copy", "cuda_ipc", "rc_mlx5", "ud_mlx5"], [false, true]),
            // `rc,cuda`
            (&["cuda_copy", "cuda_ipc", "gdr_copy", "rc_mlx5", "ud_mlx5"], [false, true]),
            (&["cma", "cuda_copy", "cuda_ipc", "posix"], [false, false]),
            (&["cuda_copy"], [false, false]),
            (&["cuda_copy", "gdr_copy"], [false, false]),
        ];
        for (transports, [with_writes, with_gets]) in cases {
            for path in [DataPath::ByLanes, DataPath::DirectPuts, DataPath::Staged] {
                assert_eq!(fences(transports, path), with_writes, "{transports:?}, {path:?}");
            }
            assert_eq!(fences(transports, DataPath::Gets), with_gets, "{transports:?}, gets");
        }
    }

    /// Reads of such a worker outlast it.
    #[test]
    fn cuda_ipc_is_found_among_other_lanes() {
        assert!(have_cuda_ipc(&["cuda_copy", "cuda_ipc", "rc_mlx5"]) && have_cuda_ipc(&["cuda_ipc"]));
        assert!(!have_cuda_ipc(&["cuda_copy", "gdr_copy", "rc_mlx5"]) && !have_cuda_ipc::<&str>(&[]));
    }

    #[test]
    fn lanes_that_nobody_has_looked_at_are_named() {
        // What UCX's alias `ib` may open on a node with GPUs.
        let ib = ["dc_mlx5", "gga_mlx5", "rc_gda", "rc_mlx5", "rc_verbs", "srd", "ud_mlx5", "ud_verbs"];
        assert_eq!(unknown(&ib), ["gga_mlx5", "rc_gda", "srd"]);
        let known = ["cma", "cuda_copy", "cuda_ipc", "gdr_copy", "knem", "posix", "self", "sysv", "tcp", "xpmem"];
        assert_eq!(unknown(&known), [""; 0]);
    }

    #[test]
    fn a_process_alone_with_itself_reaches_nobody() {
        let cases: [(&[&str], bool); 11] = [
            (&["self", "tcp"], true),
            (&["posix"], true),
            (&["self"], false),
            (&[], false),
            (&["cuda_copy"], false),
            (&["cuda_copy", "gdr_copy"], false),
            (&["cuda_copy", "gdr_copy", "self"], false),
            (&["cuda_copy", "cuda_ipc", "self"], false),
            (&["cuda_copy", "rc_mlx5"], true),
            (&["cuda_copy", "posix", "self"], true),
            (&["cuda_copy", "of_tomorrow"], true),
        ];
        for (transports, expected) in cases {
            assert_eq!(reach_others(transports), expected, "{transports:?}");
        }
    }

    #[test]
    fn only_lanes_of_a_nic_write_by_themselves() {
        let cases: [(&[&str], bool); 12] = [
            (&["rc_mlx5/mlx5_0:1"], true),
            (&["dc_mlx5/mlx5_0:1", "rc_verbs/mlx5_1:1"], true),
            (&["rc_mlx5/mlx5_0:1", "tcp/eth0"], false),
            (&["ud_verbs/mlx5_0:1"], false),
            (&["tcp/lo"], false),
            (&[], false),
            (&["cuda_copy/cuda", "rc_mlx5/mlx5_0:1"], true),
            (&["cuda_copy/cuda", "gdr_copy/cuda", "rc_mlx5/mlx5_0:1"], true),
            (&["cuda_ipc/cuda", "rc_mlx5/mlx5_0:1"], false),
            (&["cuda_copy/cuda", "posix/memory"], false),
            (&["cuda_copy/cuda"], false),
            (&["cuda_ipc/cuda"], false),
        ];
        for (lanes, expected) in cases {
            let lanes: Vec<String> = lanes.iter().map(|&lane| lane.into()).collect();
            assert_eq!(write_by_themselves(&lanes), expected, "{lanes:?}");
        }
    }
}
