//! Lists what this host has for moving KV, for tools that prepare a host.

use crate::UcxLanes;
use crate::transport::ucx::reach_others;
use crate::ucx::{Context, take_stdout, version};
use baton_types::MemoryKind;
use std::fs::File;
use std::io;

/// What UCX finds here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UcxInventory {
    /// Version of the library, e.g. `1.22.0`.
    pub version: String,
    /// Transports with their devices, e.g. `tcp` and `eth0`, in UCX's order.
    pub resources: Vec<(String, String)>,
    /// Whether it tells a GPU's memory from the host's.
    pub knows_cuda: bool,
}

/// Lists UCX's version and resources. `tls` and `devices` restrict the list as `UCX_TLS` and `UCX_NET_DEVICES` do; `all` does not.
///
/// # Errors
/// UCX's message, where it cannot start or has none of the named resources.
pub fn ucx(tls: &str, devices: &str) -> Result<UcxInventory, String> {
    let context = Context::new(&[("TLS", tls), ("NET_DEVICES", devices)]).map_err(|e| e.to_string())?;
    let knows_cuda = context.supports(MemoryKind::Cuda(0));
    Ok(UcxInventory { version: version(), resources: context.resources(), knows_cuda })
}

/// Whether workers of two processes can be connected by this transport of UCX. Not so by `self`, nor by copies between host and device memory
/// of one process (`cuda_copy`, `gdr_copy`), nor by `cuda_ipc` alone.
pub fn reaches_others(transport: &str) -> bool {
    reach_others(&[transport])
}

/// Whether UCX finds RDMA lanes here.
pub fn has_rdma() -> bool {
    // UCX warns when it is asked for devices that do not exist.
    let devices = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some());
    devices && ucx(UcxLanes::Rdma.tls(), "all").is_ok()
}

/// Standard output for the caller alone. UCX logs there: from this call on, its log and everything else that is printed goes to standard
/// error.
///
/// # Errors
/// If there is no standard output, or no free descriptor for it.
pub fn stdout_without_ucx() -> io::Result<File> {
    take_stdout()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_over_loopback_is_found() {
        let found = ucx("tcp", "all").unwrap();
        assert!(found.version.starts_with("1."), "{found:?}");
        assert!(found.resources.contains(&("tcp".into(), "lo".into())), "{found:?}");
        assert_eq!(ucx("tcp", "lo").unwrap().resources, [("tcp".to_owned(), "lo".to_owned())]);
        assert!(ucx("carrier_pigeon", "all").is_err() && ucx("tcp", "mlx5_99:1").is_err());
    }
}
