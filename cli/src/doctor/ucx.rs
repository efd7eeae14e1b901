//! UCX: its version, and what it would move KV over.

use super::finding::{Finding, Verdict};
use baton_kv_transfer::inventory::{self, UcxInventory};
use std::collections::BTreeMap;

/// Transports of RDMA begin so.
const RDMA: [&str; 4] = ["rc_", "dc_", "ud_", "srd"];

/// Asks UCX; `tls` narrows its transports, `rdma` says whether one of RDMA has to be among them.
pub(super) fn look(tls: &str, rdma: bool) -> Finding {
    judge(inventory::ucx(tls), rdma)
}

fn judge(found: Result<UcxInventory, String>, rdma: bool) -> Finding {
    let inventory = match found {
        Ok(inventory) => inventory,
        Err(error) => {
            let remedy = "name transports that `ucx_info -d` lists, or leave --ucx-tls out; the plain transport works without UCX (transfer.transport)";
            return Finding::new("ucx", Verdict::Failure, error, remedy);
        }
    };
    let mut devices: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (transport, device) in &inventory.resources {
        devices.entry(transport).or_default().push(device);
    }
    let has_rdma = devices.keys().any(|transport| RDMA.iter().any(|name| transport.starts_with(name)));
    let lanes: Vec<String> = devices.iter().map(|(transport, on)| format!("{transport} ({})", on.join(" "))).collect();
    let found = format!("{}: {}", inventory.version, lanes.join(", "));
    if has_rdma || !rdma {
        return Finding::ok("ucx", found);
    }
    let remedy = "this build of UCX sees no RDMA lane: build with --features rdma, or with UCX_DIR, and look at the devices above";
    Finding::new("ucx", Verdict::Failure, found, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_has_to_be_there_where_it_is_asked_for() {
        let with = |transport: &str| {
            let resources =
                vec![("tcp".into(), "eth0".into()), ("tcp".into(), "lo".into()), (transport.into(), "mlx5_0:1".into())];
            Ok(UcxInventory { version: "1.22.0".into(), resources })
        };
        assert_eq!(judge(with("rc_mlx5"), true), Finding::ok("ucx", "1.22.0: rc_mlx5 (mlx5_0:1), tcp (eth0 lo)"));
        assert_eq!(judge(with("tcp"), true).verdict, Verdict::Failure);
        assert_eq!(judge(with("tcp"), false).verdict, Verdict::Ok);
        assert_eq!(judge(Err("no such transport".into()), false).verdict, Verdict::Failure);
        assert_eq!(look("tcp", false).verdict, Verdict::Ok);
    }
}
