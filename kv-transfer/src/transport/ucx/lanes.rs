//! Properties of lanes: which of them write without the peer's processor, and which are fenced by destroying the worker.

/// Transports on which our own worker stores a peer's write, from its sockets and queues or by its queue pair. Once the worker is
/// destroyed, nothing can arrive through them.
///
/// Excluded are transports by which the peer writes our memory directly (`cma`, `xpmem`, `knem`, `cuda_ipc`, `rocm_ipc`, `ze_ipc`), and
/// unknown ones. UCX's own shared memory (`posix`, `sysv`) cannot map a pool that UCX did not allocate: there, writes go through the
/// worker's receive queue.
const FENCED: [&str; 9] = ["self", "tcp", "posix", "sysv", "rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5"];

/// Whether destroying the worker of a connection fences it, if its peer could reach it only by these transports. An empty list does not
/// fence.
pub(super) fn fences<S: AsRef<str>>(transports: &[S]) -> bool {
    !transports.is_empty() && transports.iter().all(|t| FENCED.contains(&t.as_ref()))
}

/// Whether another process can be reached by any of these. UCX silently omits network devices that are down when it starts, and never
/// checks again.
pub(super) fn reach_others<S: AsRef<str>>(transports: &[S]) -> bool {
    transports.iter().any(|t| t.as_ref() != "self")
}

/// Transports by which the NIC writes a peer's memory and acknowledges it, whatever happens to the processes.
const ONE_SIDED: [&str; 3] = ["rc_verbs", "rc_mlx5", "dc_mlx5"];

/// Whether every put over an endpoint with these lanes (such as `tcp/eth0`) is one-sided. Otherwise UCX emulates some by messages that the
/// peer's UCX must acknowledge.
pub(super) fn write_by_themselves(lanes: &[String]) -> bool {
    let one_sided = |lane: &String| ONE_SIDED.contains(&lane.split('/').next().unwrap_or_default());
    !lanes.is_empty() && lanes.iter().all(one_sided)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lanes_that_end_with_the_worker_are_fenced() {
        let cases: [(&[&str], bool); 8] = [
            (&["tcp"], true),
            (&["posix", "self", "sysv", "tcp"], true),
            (&["rc_mlx5", "ud_mlx5"], true),
            (&["dc_mlx5"], true),
            (&["cma", "tcp"], false),
            (&["tcp", "xpmem"], false),
            (&["tcp", "of_tomorrow"], false),
            (&[], false),
        ];
        for (transports, expected) in cases {
            assert_eq!(fences(transports), expected, "{transports:?}");
        }
    }

    #[test]
    fn a_process_alone_with_itself_reaches_nobody() {
        let cases: [(&[&str], bool); 4] =
            [(&["self", "tcp"], true), (&["posix"], true), (&["self"], false), (&[], false)];
        for (transports, expected) in cases {
            assert_eq!(reach_others(transports), expected, "{transports:?}");
        }
    }

    #[test]
    fn only_lanes_of_a_nic_write_by_themselves() {
        let cases: [(&[&str], bool); 6] = [
            (&["rc_mlx5/mlx5_0:1"], true),
            (&["dc_mlx5/mlx5_0:1", "rc_verbs/mlx5_1:1"], true),
            (&["rc_mlx5/mlx5_0:1", "tcp/eth0"], false),
            (&["ud_verbs/mlx5_0:1"], false),
            (&["tcp/lo"], false),
            (&[], false),
        ];
        for (lanes, expected) in cases {
            let lanes: Vec<String> = lanes.iter().map(|&lane| lane.into()).collect();
            assert_eq!(write_by_themselves(&lanes), expected, "{lanes:?}");
        }
    }
}
