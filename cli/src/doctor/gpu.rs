//! Checks GPUs: the driver, the device nodes that a process needs, and whether a NIC can access GPU memory.

use super::finding::{Finding, Verdict};
use super::sysfs::{Node, line, names, node};
use std::path::Path;

/// Checks below `root`, which is `/` except in tests. `wanted` says whether GPUs will be used here, `rdma` whether a NIC has to access
/// them.
pub(super) fn look(root: &Path, wanted: bool, rdma: bool) -> Vec<Finding> {
    vec![driver(root, wanted), gpu_direct(root, wanted && rdma)]
}

/// Nodes that CUDA opens besides each GPU's.
const SHARED: [&str; 2] = ["nvidiactl", "nvidia-uvm"];

fn driver(root: &Path, wanted: bool) -> Finding {
    let lacks = |found: String, remedy: &str| Finding::new("gpu", Verdict::Failure.if_wanted(wanted), found, remedy);
    let Some(version) = line(&root.join("proc/driver/nvidia/version")) else {
        let remedy = "no NVIDIA driver is loaded: install it on this host (in Kubernetes on the node, whose drivers a container sees)";
        return lacks("no driver".into(), remedy);
    };
    let is_gpu = |name: &String| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    let gpus: Vec<String> = names(&root.join("dev")).into_iter().filter(is_gpu).collect();
    let needed = gpus.iter().map(String::as_str).chain(SHARED);
    let nodes: Vec<(&str, Node)> = needed.map(|name| (name, node(&root.join("dev").join(name)))).collect();
    let missing = nodes.iter().find(|(_, node)| *node == Node::Missing).map(|(name, _)| *name);
    if let Some(name) = if gpus.is_empty() { Some("nvidia0") } else { missing } {
        let remedy = "the driver is the host's and no GPU was given to this container: ask for nvidia.com/gpu in the pod's limits \
                      (gpu.count of the chart), and name NVIDIA's runtime class where it is not the node's default (runtimeClassName); \
                      outside of containers `nvidia-smi` and `nvidia-modprobe -u -c 0`, as root, make the nodes";
        return lacks(format!("no /dev/{name}; {version}"), remedy);
    }
    let closed = nodes.iter().find_map(|(name, node)| match node {
        Node::Closed(why) => Some(format!("/dev/{name}: {why}; {version}")),
        _ => None,
    });
    if let Some(found) = closed {
        let remedy = "the node is there and may not be opened: a volume alone gives no right to a device, so ask for nvidia.com/gpu; \
                      where this is not root, it needs mode 0666 on the host (NVreg_DeviceFileMode)";
        return lacks(found, remedy);
    }
    let count = gpus.len();
    Finding::ok("gpu", format!("{count} GPU{}, {version}", if count == 1 { "" } else { "s" }))
}

/// Whether a NIC may read and write a GPU's memory: through the module, or through DMA buffers of the open kernel driver.
fn gpu_direct(root: &Path, wanted: bool) -> Finding {
    let modules = root.join("sys/module");
    let module = ["nvidia_peermem", "nv_peer_mem"].into_iter().find(|module| modules.join(module).exists());
    if let Some(module) = module {
        return Finding::ok("gpudirect", format!("module {module}"));
    }
    let open = line(&root.join("proc/driver/nvidia/version")).is_some_and(|v| v.contains("Open Kernel Module"));
    if open && has_dma_buffers(root) && !names(&root.join("sys/class/infiniband")).is_empty() {
        return Finding::ok("gpudirect", "DMA buffers of the open kernel driver");
    }
    let remedy = "without it KV on GPUs is copied through host memory: on this host (in Kubernetes on the node) modprobe nvidia_peermem, or \
                  use NVIDIA's open kernel modules with Linux 5.12 or later";
    Finding::new("gpudirect", Verdict::Warning.if_wanted(wanted), "not found", remedy)
}

/// Linux registers DMA buffers with RDMA devices since 5.12.
fn has_dma_buffers(root: &Path) -> bool {
    let release = line(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version >= (5, 12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::sysfs::tests::root;

    const VERSION: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1";

    /// A host with a driver and these nodes of `/dev`.
    fn host(nodes: &[&str], kernel: &str) -> tempfile::TempDir {
        let nodes: Vec<String> = nodes.iter().map(|node| format!("dev/{node}")).collect();
        let mut files = vec![
            ("proc/driver/nvidia/version", VERSION),
            ("proc/driver/nvidia/gpus/0000:01:00.0/information", ""),
            ("proc/sys/kernel/osrelease", kernel),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
        ];
        files.extend(nodes.iter().map(|node| (node.as_str(), "")));
        root(&files)
    }

    #[test]
    fn what_is_not_there_fails_where_it_is_asked_for() {
        let bare = root(&[]);
        let of = |wanted| look(bare.path(), wanted, true).into_iter().map(|f| f.verdict).collect::<Vec<_>>();
        assert_eq!(of(false), [Verdict::Absent; 2]);
        assert_eq!(of(true), [Verdict::Failure, Verdict::Warning]);
    }

    #[test]
    fn gpus_are_those_that_open() {
        let one = host(&["nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps/", "nvme0"], "5.15.0-1-generic");
        assert_eq!(driver(one.path(), true), Finding::ok("gpu", format!("1 GPU, {VERSION}")));
        let two = host(&["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], "5.15.0");
        assert!(driver(two.path(), true).found.starts_with("2 GPUs, "));
    }

    #[test]
    fn a_driver_without_its_nodes_is_told_by_the_node() {
        for (nodes, found, remedy) in [
            (&[][..], "no /dev/nvidia0; ", "nvidia.com/gpu"),
            (&["nvidia0", "nvidiactl"], "no /dev/nvidia-uvm; ", "runtimeClassName"),
            (&["nvidia0/", "nvidiactl", "nvidia-uvm"], "/dev/nvidia0: ", "may not be opened"),
        ] {
            let host = host(nodes, "5.15.0");
            let told = driver(host.path(), true);
            assert_eq!(told.verdict, Verdict::Failure, "{nodes:?}");
            assert!(told.found.starts_with(found) && told.found.ends_with(VERSION), "{told:?}");
            assert!(told.remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{told:?}");
            assert_eq!(driver(host.path(), false).verdict, Verdict::Absent);
        }
    }

    #[test]
    fn dma_buffers_need_a_kernel_that_has_them() {
        for (kernel, verdict) in [
            ("5.12.0", Verdict::Ok),
            ("6.8.0-45-generic", Verdict::Ok),
            ("5.4.0-190-generic", Verdict::Warning),
            ("", Verdict::Warning),
        ] {
            assert_eq!(gpu_direct(host(&[], kernel).path(), true).verdict, verdict, "{kernel}");
        }
        let module = root(&[("sys/module/nvidia_peermem/version", "570.1")]);
        assert_eq!(gpu_direct(module.path(), true), Finding::ok("gpudirect", "module nvidia_peermem"));
    }
}
