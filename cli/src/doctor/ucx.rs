//! Checks UCX: its version, and the lanes that it would move KV over.

use super::finding::{Finding, Verdict};
use super::net_devices::NetDevices;
use baton_kv_transfer::inventory::{self, UcxInventory};
use std::collections::BTreeMap;

/// Prefixes of the names of RDMA transports.
const RDMA: [&str; 5] = ["rc_", "dc_", "ud_", "srd", "gga_"];

/// Whether a transport of this name uses RDMA.
pub(super) fn is_rdma(transport: &str) -> bool {
    RDMA.iter().any(|name| transport.starts_with(name))
}

/// What is expected of RDMA here.
#[derive(Clone, Copy)]
pub(super) struct Rdma {
    /// There must be an RDMA lane.
    pub(super) wanted: bool,
    /// This process can use one of the ports.
    pub(super) usable: bool,
}

/// Queries UCX; `tls` and `devices` restrict what it finds.
pub(super) fn look(tls: &str, devices: &NetDevices, rdma: Rdma) -> Finding {
    judge(inventory::ucx(tls, devices.given().unwrap_or("all")), || inventory::ucx("all", "all"), rdma)
}

/// `all` queries without restrictions, if that helps to find the cause.
fn judge(
    found: Result<UcxInventory, String>,
    all: impl FnOnce() -> Result<UcxInventory, String>,
    rdma: Rdma,
) -> Finding {
    let inventory = match found {
        Ok(inventory) => inventory,
        Err(error) => return Finding::new("ucx", Verdict::Failure, error, remedy(all(), rdma)),
    };
    let found = format!("{}: {}", inventory.version, lanes(&inventory));
    let reaches_others = inventory.resources.iter().any(|(transport, _)| inventory::reaches_others(transport));
    if reaches_others && (has_rdma(&inventory) || !rdma.wanted) {
        return Finding::ok("ucx", found);
    }
    Finding::new("ucx", Verdict::Failure, found, remedy(all(), rdma))
}

/// Whether UCX moves KV out of a GPU's memory, and by which transports. Queries UCX without restrictions.
pub(super) fn look_for_cuda(wanted: bool) -> Finding {
    judge_cuda(inventory::ucx("all", "all"), wanted)
}

fn judge_cuda(found: Result<UcxInventory, String>, wanted: bool) -> Finding {
    let remedy = "without it KV on GPUs is copied through host memory: use an image for CUDA, or build with a UCX_DIR whose UCX has CUDA, and \
                  keep libuct_cuda and libucm_cuda with the libcudart beside it";
    let inventory = match found {
        Ok(inventory) if inventory.knows_cuda => inventory,
        Ok(inventory) => {
            let found = format!("{}: host memory alone", inventory.version);
            return Finding::new("ucx cuda", Verdict::Warning.if_wanted(wanted), found, remedy);
        }
        Err(error) => return Finding::new("ucx cuda", Verdict::Warning.if_wanted(wanted), error, remedy),
    };
    let mut copies: Vec<&str> = inventory.resources.iter().map(|(transport, _)| transport.as_str()).collect();
    copies.retain(|transport| transport.contains("cuda") || transport.starts_with("gdr"));
    copies.dedup();
    Finding::ok("ucx cuda", format!("{}: host and CUDA memory; {}", inventory.version, copies.join(", ")))
}

fn has_rdma(inventory: &UcxInventory) -> bool {
    inventory.resources.iter().any(|(transport, _)| is_rdma(transport))
}

/// `rc_mlx5 (mlx5_0:1), tcp (eth0 lo)`.
fn lanes(inventory: &UcxInventory) -> String {
    let mut devices: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (transport, device) in &inventory.resources {
        devices.entry(transport).or_default().push(device);
    }
    let lanes: Vec<String> = devices.iter().map(|(transport, on)| format!("{transport} ({})", on.join(" "))).collect();
    lanes.join(", ")
}

/// The remedy for missing lanes; `all` is the inventory without restrictions.
fn remedy(all: Result<UcxInventory, String>, rdma: Rdma) -> String {
    match all {
        _ if rdma.wanted && !rdma.usable => "UCX has no RDMA port to use: do first what is said of rdma above".into(),
        Err(_) => "UCX starts with nothing here: transfer.transport = \"tcp\" does without it".into(),
        Ok(all) if rdma.wanted && has_rdma(&all) => {
            "UCX has RDMA lanes, which --ucx-tls or --ucx-net-devices leaves out: add rc to the one (transfer.ucx_tls, rdma.lanes of the \
             chart), and the port to the other (transfer.ucx_net_devices, rdma.devices)"
                .into()
        }
        Ok(_) if rdma.wanted => format!(
            "a port can be used, and this UCX finds no lane over it: {}install the NIC's provider library (ibverbs-providers) where this runs",
            if cfg!(feature = "rdma") { "" } else { "build with --features rdma, or with a UCX_DIR that has `ib`, and " }
        ),
        Ok(mut all) => {
            // Over `tcp`, UCX stores whatever a peer writes at any address that the peer names.
            all.resources.retain(|(transport, _)| inventory::reaches_others(transport) && transport != "tcp");
            format!(
                "--ucx-tls and --ucx-net-devices (transfer.ucx_tls, ucx_net_devices) leave no lane to another process; name some of: {}",
                lanes(&all)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(transports: &[&str]) -> Result<UcxInventory, String> {
        let of = |transport: &&str| match *transport {
            "tcp" => vec![("tcp".to_owned(), "eth0".to_owned()), ("tcp".into(), "lo".into())],
            "self" => vec![("self".into(), "memory".into())],
            rdma => vec![(rdma.to_owned(), "mlx5_0:1".into())],
        };
        Ok(UcxInventory {
            version: "1.22.0".into(),
            resources: transports.iter().flat_map(of).collect(),
            knows_cuda: false,
        })
    }

    const WANTED: Rdma = Rdma { wanted: true, usable: true };
    const NOT_WANTED: Rdma = Rdma { wanted: false, usable: true };

    #[test]
    fn rdma_has_to_be_there_where_it_is_asked_for() {
        let unasked = || -> Result<UcxInventory, String> { panic!("nothing is wrong") };
        assert_eq!(
            judge(with(&["tcp", "rc_mlx5"]), unasked, WANTED),
            Finding::ok("ucx", "1.22.0: rc_mlx5 (mlx5_0:1), tcp (eth0 lo)")
        );
        assert_eq!(judge(with(&["tcp"]), unasked, NOT_WANTED).verdict, Verdict::Ok);
        assert_eq!(judge(with(&["tcp"]), || with(&["tcp"]), WANTED).verdict, Verdict::Failure);
        assert_eq!(look("tcp", &NetDevices::default(), NOT_WANTED).verdict, Verdict::Ok);
        assert_eq!(look("tcp", &"lo".parse().unwrap(), NOT_WANTED).found.split_once(": ").unwrap().1, "tcp (lo)");
    }

    #[test]
    fn a_ucx_without_cuda_is_told_where_gpus_are() {
        let of = |knows_cuda, wanted| {
            let found =
                with(&["tcp", "cuda_copy", "cuda_ipc", "rc_mlx5"]).map(|all| UcxInventory { knows_cuda, ..all });
            judge_cuda(found, wanted)
        };
        assert_eq!(of(true, true), Finding::ok("ucx cuda", "1.22.0: host and CUDA memory; cuda_copy, cuda_ipc"));
        assert_eq!(of(false, true).verdict, Verdict::Warning);
        assert_eq!(of(false, false).verdict, Verdict::Absent);
        assert_eq!(judge_cuda(Err("No such device".into()), true).verdict, Verdict::Warning);
    }

    #[test]
    fn the_remedy_is_for_what_is_wrong() {
        let told = |found: &[&str], all: &[&str], rdma: Rdma| {
            let Finding { verdict, remedy, .. } = judge(with(found), || with(all), rdma);
            assert_eq!(verdict, Verdict::Failure, "{found:?}");
            remedy.unwrap()
        };
        let no_port = told(&["tcp"], &["tcp"], Rdma { usable: false, ..WANTED });
        assert!(no_port.contains("rdma above") && !no_port.contains("build"), "{no_port}");
        let narrowed = told(&["tcp"], &["tcp", "rc_verbs"], WANTED);
        assert!(narrowed.contains("add rc") && !narrowed.contains("build"), "{narrowed}");
        let lacking = told(&["tcp"], &["tcp"], WANTED);
        assert!(lacking.contains("ibverbs-providers"), "{lacking}");
        let alone = told(&["self"], &["self", "tcp", "rc_verbs"], NOT_WANTED);
        assert!(alone.ends_with(": rc_verbs (mlx5_0:1)"), "{alone}");
        let copies = told(&["self", "cuda_copy"], &["self", "cuda_copy", "tcp", "rc_verbs"], NOT_WANTED);
        assert!(copies.ends_with(": rc_verbs (mlx5_0:1)"), "{copies}");
        let no_port = told(&["self"], &["self", "tcp"], Rdma { usable: false, ..WANTED });
        assert!(no_port.contains("rdma above"), "{no_port}");
        let of_none = |all: &[&str], rdma| judge(Err("No such device".into()), || with(all), rdma).remedy.unwrap();
        assert!(of_none(&["tcp"], WANTED).contains("ibverbs-providers"));
        assert!(of_none(&["tcp"], Rdma { usable: false, ..WANTED }).contains("rdma above"));
        assert!(of_none(&["tcp", "rc_mlx5"], WANTED).contains("add rc"));
    }

    #[test]
    fn names_that_ucx_does_not_know_are_told_with_those_it_does() {
        for (tls, devices) in [("carrier_pigeon", ""), ("tcp", "mlx5_99:1"), ("ib", "mlx5_99:1")] {
            let told = look(tls, &devices.parse().unwrap(), NOT_WANTED);
            assert_eq!(told.verdict, Verdict::Failure, "{told:?}");
            assert!(told.remedy.as_ref().is_some_and(|remedy| remedy.contains("posix (")), "{told:?}");
        }
    }
}
