//! Devices of this host, as the kernel shows them: RDMA, network, GPU.

use super::finding::{Finding, Verdict};
use std::net::IpAddr;
use std::path::Path;

/// Looks below `root`, `/` but in tests; `rdma` and `gpu` say what is to be used here.
pub(super) fn look(root: &Path, rdma: bool, gpu: bool) -> Vec<Finding> {
    let mut findings = rdma_devices(root, rdma);
    findings.push(driver(root, gpu));
    findings.push(gpu_direct(root, rdma && gpu));
    findings
}

/// Names in a folder, sorted; none where it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn line(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

fn rdma_devices(root: &Path, wanted: bool) -> Vec<Finding> {
    let class = root.join("sys/class/infiniband");
    let ports = names(&class).into_iter().flat_map(|device| {
        let ports = class.join(&device).join("ports");
        names(&ports).into_iter().map(move |port| (format!("rdma {device}:{port}"), ports.join(port)))
    });
    let found: Vec<Finding> = ports.map(|(name, port)| rdma_port(name, &port, wanted)).collect();
    if found.is_empty() {
        let remedy = "no RDMA device is seen here: KV goes over TCP; load the NIC's driver, or give the container an RDMA device (rdma/... of \
                      the device plugin)";
        return vec![Finding::new("rdma", Verdict::Failure.if_wanted(wanted), "no device", remedy)];
    }
    found
}

/// State, rate and link layer of a port: `4: ACTIVE`, `200 Gb/sec (4X HDR)`, `InfiniBand`.
fn rdma_port(name: String, port: &Path, wanted: bool) -> Finding {
    let [state, rate, link] =
        ["state", "rate", "link_layer"].map(|file| line(&port.join(file)).unwrap_or_else(|| "unknown".into()));
    let found = format!("{state}, {rate}, {link}");
    if state.ends_with("ACTIVE") {
        return Finding::ok(name, found);
    }
    let remedy = "the port carries nothing: look at cable, switch and (InfiniBand) subnet manager, or leave it out with transfer.ucx_net_devices";
    Finding::new(name, if wanted { Verdict::Failure } else { Verdict::Warning }, found, remedy)
}

fn driver(root: &Path, wanted: bool) -> Finding {
    let remedy = "no NVIDIA driver is seen here: install it, or give the container nvidia.com/gpu";
    match line(&root.join("proc/driver/nvidia/version")) {
        Some(version) => {
            let gpus = names(&root.join("proc/driver/nvidia/gpus")).len();
            Finding::ok("gpu", format!("{gpus} GPUs, {version}"))
        }
        None => Finding::new("gpu", Verdict::Failure.if_wanted(wanted), "no driver", remedy),
    }
}

/// Whether a NIC may read and write a GPU's memory: by the module, or by DMA buffers of the open kernel driver.
fn gpu_direct(root: &Path, wanted: bool) -> Finding {
    let modules = root.join("sys/module");
    let module = ["nvidia_peermem", "nv_peer_mem"].into_iter().find(|module| modules.join(module).exists());
    if let Some(module) = module {
        return Finding::ok("gpudirect", format!("module {module}"));
    }
    let version = line(&root.join("proc/driver/nvidia/version")).unwrap_or_default();
    if version.contains("Open Kernel Module") && !names(&root.join("sys/class/infiniband")).is_empty() {
        return Finding::ok("gpudirect", "DMA buffers of the open kernel driver (Linux 5.12 and later)");
    }
    let remedy =
        "without it KV on GPUs is copied through host memory: modprobe nvidia_peermem, or use the open kernel driver";
    Finding::new("gpudirect", Verdict::Warning.if_wanted(wanted), "not found", remedy)
}

/// Name and rate in bytes a second of the network device that has this address; no rate where the device tells none.
pub(super) fn of_address(root: &Path, address: IpAddr, devices: &[(String, IpAddr)]) -> Option<(String, Option<f64>)> {
    let (name, _) = devices.iter().find(|(_, has)| *has == address)?;
    let megabits: Option<f64> = line(&root.join("sys/class/net").join(name).join("speed")).and_then(|s| s.parse().ok());
    Some((name.clone(), megabits.filter(|rate| *rate > 0.0).map(|rate| rate * 1e6 / 8.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn verdicts(root: &Path, rdma: bool, gpu: bool) -> Vec<(String, Verdict)> {
        look(root, rdma, gpu).into_iter().map(|f| (f.check, f.verdict)).collect()
    }

    #[test]
    fn what_is_not_there_fails_where_it_is_asked_for() {
        let bare = root(&[]);
        let of = |verdicts: &[(String, Verdict)]| verdicts.iter().map(|(_, v)| *v).collect::<Vec<_>>();
        assert_eq!(of(&verdicts(bare.path(), false, false)), [Verdict::Absent; 3]);
        assert_eq!(of(&verdicts(bare.path(), true, true)), [Verdict::Failure, Verdict::Failure, Verdict::Warning]);
    }

    #[test]
    fn ports_and_gpus_are_read() {
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        let full = root(&[
            (&format!("{port}/state"), "4: ACTIVE\n"),
            (&format!("{port}/rate"), "200 Gb/sec (4X HDR)\n"),
            (&format!("{port}/link_layer"), "InfiniBand\n"),
            ("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1\n"),
            ("proc/driver/nvidia/gpus/0000:01:00.0/information", ""),
        ]);
        let found = look(full.path(), true, true);
        assert_eq!(found[0], Finding::ok("rdma mlx5_0:1", "4: ACTIVE, 200 Gb/sec (4X HDR), InfiniBand"));
        assert_eq!((found[1].check.as_str(), found[1].verdict), ("rdma mlx5_1:1", Verdict::Failure));
        assert!(found[2].found.starts_with("1 GPUs, NVRM version"), "{found:?}");
        assert_eq!((found[3].check.as_str(), found[3].verdict), ("gpudirect", Verdict::Ok));
    }

    #[test]
    fn the_rate_of_an_address_is_its_device_s() {
        let full = root(&[("sys/class/net/eth0/speed", "25000\n"), ("sys/class/net/lo/speed", "-1\n")]);
        let [here, lo]: [IpAddr; 2] = ["10.0.0.1", "127.0.0.1"].map(|a| a.parse().unwrap());
        let devices = [("eth0".to_owned(), here), ("lo".to_owned(), lo)];
        assert_eq!(of_address(full.path(), here, &devices), Some(("eth0".into(), Some(3.125e9))));
        assert_eq!(of_address(full.path(), lo, &devices), Some(("lo".into(), None)));
        assert_eq!(of_address(full.path(), "10.0.0.2".parse().unwrap(), &devices), None);
    }
}
