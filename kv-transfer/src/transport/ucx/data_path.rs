//! How KV moves, from where the pool is, what UCX opened, and what of that can register the pool.

use super::lanes::{self, Lane};
use baton_types::MemoryKind;
use std::fmt;

/// How KV moves between this pool and those of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataPath {
    /// The pool is host memory and is registered. Each connection puts where its lanes are one-sided, and sends messages from the pool
    /// elsewhere.
    ByLanes,
    /// GPUDirect: the NIC reads and writes device memory, which is registered with its memory type. Puts go over lanes that are `rc` alone.
    DirectPuts,
    /// The pool is registered for reads alone: no peer gets a key to put by. Where the lanes of a connection are one-sided, its sink reads
    /// the pool of its source ([`super::pulling`]); elsewhere bytes are staged.
    ///
    /// UCX 1.22 makes no key that a NIC refuses to write by: it ignores the protection that a registration asks for. So the key of reads is
    /// one that peers do not put by, like the key of `rc`, which opens the whole pool to peers that check themselves.
    Gets,
    /// The pool is not registered. Bytes pass through buffers of the host, bounded for each connection, and go out as messages.
    Staged,
}

/// A transport that UCX opened on a memory domain. None stand for Baton's TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Opened {
    /// Such as `rc_mlx5`.
    pub(super) transport: String,
    /// The domain's name, such as `mlx5_0`.
    pub(super) domain: String,
    /// The domain took the pool when it was registered.
    pub(super) took_pool: bool,
}

/// Why bytes of a GPU are staged, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WhyStaged {
    /// UCX knows no CUDA memory.
    UnknownMemory,
    /// The GPU lets no NIC reach its memory, or could not see what it stored.
    OutOfReach,
    /// There is no lane by which a NIC reads or writes device memory.
    NoLane,
    /// These NICs did not take the pool.
    NotTaken(Vec<String>),
}

impl DataPath {
    /// The path for a pool of this kind over these transports. `reachable`: it has an address for NICs. `supported`: UCX moves memory of
    /// this kind ([`crate::ucx::Context::supports`]).
    pub(super) fn of(
        pool: MemoryKind,
        reachable: bool,
        supported: bool,
        opened: &[Opened],
    ) -> (Self, Option<WhyStaged>) {
        match pool {
            MemoryKind::Host => return (Self::ByLanes, None),
            MemoryKind::Remote => return (Self::Staged, None),
            MemoryKind::Cuda(_) => {}
        }
        let staged = |why| (Self::Staged, Some(why));
        let has = |lane| opened.iter().any(|opened| Lane::of(&opened.transport) == lane);
        if !supported {
            return staged(WhyStaged::UnknownMemory);
        }
        if !has(Lane::Rc) && !has(Lane::Dc) {
            return staged(WhyStaged::NoLane);
        }
        if !reachable {
            return staged(WhyStaged::OutOfReach);
        }
        // One NIC that did not take the pool is enough: UCX would choose it for some connection, and emulate what it cannot do there.
        let is_lane = |opened: &&Opened| matches!(Lane::of(&opened.transport), Lane::Rc | Lane::Dc);
        let mut without: Vec<_> =
            opened.iter().filter(is_lane).filter(|o| !o.took_pool).map(|o| o.domain.clone()).collect();
        without.sort();
        without.dedup();
        if !without.is_empty() {
            return staged(WhyStaged::NotTaken(without));
        }
        // Where both processes are on one host, UCX would put by `cuda_ipc` beside `rc`, and such puts have no fence.
        match has(Lane::Rc) && !has(Lane::CudaIpc) {
            true => (Self::DirectPuts, None),
            false => (Self::Gets, None),
        }
    }

    /// Whether UCX registers the pool, so that peers get a key.
    pub(super) fn registers(self) -> bool {
        match self {
            Self::ByLanes | Self::DirectPuts | Self::Gets => true,
            Self::Staged => false,
        }
    }

    /// Whether a connection over an endpoint with these lanes, such as `rc_mlx5/mlx5_0:1`, writes by UCX's puts into a pool of the host.
    pub(super) fn puts_over(self, lanes: &[String]) -> bool {
        match self {
            Self::ByLanes => lanes::write_by_themselves(lanes),
            Self::DirectPuts => lanes::are_rc(lanes),
            Self::Gets | Self::Staged => false,
        }
    }

    /// Whether it may read the peer's pool by UCX's gets.
    pub(super) fn gets_over(self, lanes: &[String]) -> bool {
        match self {
            Self::ByLanes => lanes::write_by_themselves(lanes),
            Self::DirectPuts | Self::Gets => lanes::read_by_themselves(lanes),
            Self::Staged => false,
        }
    }
}

impl fmt::Display for WhyStaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownMemory => f.write_str(
                "UCX knows no memory of CUDA: take a UCX that is built with CUDA, and name cuda_copy among transfer.ucx_tls",
            ),
            Self::OutOfReach => f.write_str("the GPU or its driver has no GPUDirect RDMA, or no way to flush what a NIC wrote"),
            Self::NoLane => f.write_str("no lane of rc or dc is open, by which a NIC moves memory of a GPU"),
            Self::NotTaken(domains) => write!(
                f,
                "{} cannot register memory of the GPU: load the kernel module nvidia-peermem on this node, or use a driver and kernel with \
                 dma-buf; or leave it out of transfer.ucx_net_devices",
                domains.join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DataPath::{ByLanes, DirectPuts, Gets, Staged};
    use super::*;
    use MemoryKind::{Cuda, Host, Remote};
    use WhyStaged::{NoLane, NotTaken, OutOfReach, UnknownMemory};

    /// Transports by their names: `rc_mlx5@mlx5_1` is on that domain, and `rc_mlx5!` on one that did not take the pool.
    fn opened(text: &str) -> Vec<Opened> {
        let of = |word: &str| {
            let (name, took_pool) = word.strip_suffix('!').map_or((word, true), |name| (name, false));
            let (transport, domain) = name.split_once('@').unwrap_or((name, "mlx5_0"));
            Opened { transport: transport.into(), domain: domain.into(), took_pool }
        };
        text.split_whitespace().map(of).collect()
    }

    #[test]
    fn kv_takes_the_path_that_memory_and_lanes_allow() {
        let not_taken = |domains: &[&str]| Some(NotTaken(domains.iter().map(|&domain| domain.into()).collect()));
        // Kind, transports, whether UCX knows the kind.
        type Chosen = (DataPath, Option<WhyStaged>);
        let cases: [(MemoryKind, &str, bool, Chosen, &str); 30] = [
            (Host, "", true, (ByLanes, None), "sockets send host memory from where it is"),
            (Host, "posix self sysv", true, (ByLanes, None), "messages from the pool"),
            (Host, "rc_mlx5 ud_mlx5", true, (ByLanes, None), "puts over rc"),
            (Host, "dc_mlx5 ud_mlx5", true, (ByLanes, None), "puts over dc"),
            (
                Host,
                "cuda_copy! rc_mlx5 ud_mlx5",
                true,
                (ByLanes, None),
                "a CUDA-aware UCX changes nothing for host memory",
            ),
            (Host, "cuda_copy! cuda_ipc! rc_mlx5", true, (ByLanes, None), "cuda_ipc moves device memory alone"),
            (Remote, "", false, (Staged, None), "it has no address, for sockets"),
            (Remote, "posix self sysv", false, (Staged, None), "it has no address, for messages"),
            (Remote, "cuda_copy rc_mlx5", false, (Staged, None), "it has no address, for a NIC"),
            (Remote, "cuda_copy cuda_ipc rc_mlx5", true, (Staged, None), "it is no memory of CUDA"),
            (Cuda(0), "", false, (Staged, Some(UnknownMemory)), "Baton's TCP always stages"),
            (
                Cuda(0),
                "rc_mlx5! ud_mlx5!",
                false,
                (Staged, Some(UnknownMemory)),
                "UCX knows CUDA memory by cuda_copy alone",
            ),
            (Cuda(0), "posix! self! sysv!", false, (Staged, Some(UnknownMemory)), "a UCX without CUDA"),
            (
                Cuda(0),
                "cuda_ipc rc_mlx5",
                false,
                (Staged, Some(UnknownMemory)),
                "cuda_ipc without cuda_copy detects no memory",
            ),
            (Cuda(0), "cuda_copy rc_mlx5 rc_verbs ud_mlx5", true, (DirectPuts, None), "GPUDirect"),
            (Cuda(7), "cuda_copy rc_verbs", true, (DirectPuts, None), "GPUDirect, of any device"),
            (Cuda(0), "cuda_copy gdr_copy rc_mlx5", true, (DirectPuts, None), "gdr_copy is a local copy"),
            (
                Cuda(0),
                "cuda_copy! rc_mlx5 ud_mlx5",
                true,
                (DirectPuts, None),
                "copies within the process need not take it",
            ),
            (
                Cuda(0),
                "cuda_copy dc_mlx5 rc_mlx5 ud_mlx5",
                true,
                (DirectPuts, None),
                "rc is there, for endpoints that get it",
            ),
            (Cuda(0), "cuda_copy rc_mlx5@a rc_mlx5@b", true, (DirectPuts, None), "all NICs took it"),
            (
                Cuda(0),
                "cuda_copy dc_mlx5 ud_mlx5",
                true,
                (Gets, None),
                "a closed endpoint of dc fences no foreign write",
            ),
            (Cuda(0), "cuda_copy cuda_ipc rc_mlx5", true, (Gets, None), "on one host UCX would put over cuda_ipc"),
            (
                Cuda(0),
                "cuda_copy ud_mlx5",
                true,
                (Staged, Some(NoLane)),
                "a get over ud is messages, which may abort the owner",
            ),
            (
                Cuda(0),
                "cuda_copy cuda_ipc posix sysv",
                true,
                (Staged, Some(NoLane)),
                "UCX may emulate a get beside cuda_ipc",
            ),
            (
                Cuda(0),
                "cuda_copy posix self sysv",
                true,
                (Staged, Some(NoLane)),
                "UCX would copy by progress of the target",
            ),
            (Cuda(0), "cma cuda_copy posix", true, (Staged, Some(NoLane)), "cma moves host memory alone"),
            (
                Cuda(0),
                "cuda_copy rc_mlx5! ud_mlx5!",
                true,
                (Staged, not_taken(&["mlx5_0"])),
                "no peermem and no dma-buf",
            ),
            (Cuda(0), "cuda_copy dc_mlx5!", true, (Staged, not_taken(&["mlx5_0"])), "the same, for gets"),
            (Cuda(0), "cuda_copy cuda_ipc rc_mlx5!", true, (Staged, not_taken(&["mlx5_0"])), "cuda_ipc alone took it"),
            (
                Cuda(0),
                "cuda_copy rc_mlx5@b! rc_mlx5@a rc_verbs@b! dc_mlx5@c!",
                true,
                (Staged, not_taken(&["b", "c"])),
                "UCX might choose a NIC that did not take it",
            ),
        ];
        for (pool, transports, supported, expected, reason) in cases {
            let found = DataPath::of(pool, pool != Remote, supported, &opened(transports));
            assert_eq!(found, expected, "{pool} over {transports}: {reason}");
        }
        let out_of_reach = DataPath::of(Cuda(0), false, true, &opened("cuda_copy rc_mlx5!"));
        assert_eq!(out_of_reach, (Staged, Some(OutOfReach)), "the driver has no GPUDirect");
    }

    #[test]
    fn a_connection_puts_and_gets_where_path_and_lanes_allow() {
        // Lanes of an endpoint; whether each path puts over them: by lanes, direct puts; and gets: by lanes, direct puts and gets.
        let cases = [
            ("rc_mlx5/mlx5_0:1", [true, true], [true, true]),
            ("cuda_copy/cuda rc_mlx5/mlx5_0:1", [true, true], [true, true]),
            ("dc_mlx5/mlx5_0:1", [true, false], [true, true]),
            ("dc_mlx5/mlx5_0:1 rc_mlx5/mlx5_0:1", [true, false], [true, true]),
            ("cuda_ipc/cuda rc_mlx5/mlx5_0:1", [false, false], [false, true]),
            ("cuda_ipc/cuda posix/memory", [false, false], [false, false]),
            ("cuda_ipc/cuda", [false, false], [false, false]),
            ("ud_mlx5/mlx5_0:1", [false, false], [false, false]),
            ("rc_mlx5/mlx5_0:1 ud_mlx5/mlx5_0:1", [false, false], [false, false]),
            ("posix/memory sysv/memory", [false, false], [false, false]),
            ("cuda_copy/cuda", [false, false], [false, false]),
            ("", [false, false], [false, false]),
        ];
        for (lanes, puts, gets) in cases {
            let lanes: Vec<String> = lanes.split_whitespace().map(Into::into).collect();
            let paths = [ByLanes, DirectPuts, Gets, Staged];
            let found = paths.map(|path| (path.puts_over(&lanes), path.gets_over(&lanes)));
            let [by_lanes, direct] = [0, 1].map(|at| (puts[at], gets[at]));
            assert_eq!(found, [by_lanes, direct, (false, gets[1]), (false, false)], "{lanes:?}");
        }
    }

    #[test]
    fn only_staged_pools_are_not_registered() {
        assert_eq!([ByLanes, DirectPuts, Gets, Staged].map(DataPath::registers), [true, true, true, false]);
    }

    #[test]
    fn the_log_says_what_to_do() {
        let said = NotTaken(vec!["mlx5_0".into(), "mlx5_3".into()]).to_string();
        let words = ["mlx5_0, mlx5_3", "nvidia-peermem", "dma-buf", "transfer.ucx_net_devices"];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(UnknownMemory.to_string().contains("cuda_copy"));
    }
}
