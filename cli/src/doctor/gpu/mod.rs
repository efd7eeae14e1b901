//! Checks GPUs: the driver, the device nodes that a process needs, the files of kernels, each GPU, whether a NIC can access its memory, and
//! cuBLASLt.

mod devices;

use super::finding::{Finding, Verdict};
use super::rdma::UsablePort;
use super::sysfs::{Node, line, names, node};
use baton_kernels::cuda::{self, CudaError, Host, KernelsFile};
use std::path::Path;

/// What is asked for here.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// GPUs will be used.
    pub(super) gpu: bool,
    /// KV will move by RDMA.
    pub(super) rdma: bool,
}

/// Checks below `root`, which is `/` except in tests. `kernels` is the folder of files of kernels; `ask` loads the CUDA driver, and is
/// called where that has devices. Also returns whether a GPU can be used.
pub(super) fn look(
    root: &Path,
    wanted: Wanted,
    kernels: &Path,
    ports: &[UsablePort],
    ask: impl FnOnce(&Path) -> Result<Host, CudaError>,
) -> (Vec<Finding>, bool) {
    let driver = driver(root, wanted.gpu);
    let opens = matches!(driver.verdict, Verdict::Ok | Verdict::Warning);
    let mut findings = vec![driver];
    findings.extend(files(kernels, wanted.gpu || opens));
    if !opens && !wanted.gpu {
        return (findings, false);
    }
    findings.push(gpu_direct(root, wanted.gpu && wanted.rdma));
    let Some(asked) = opens.then(|| ask(kernels)) else { return (findings, false) };
    match asked {
        Ok(host) => {
            findings.extend(devices::judge(root, &host.gpus, wanted, ports));
            findings.extend((!host.gpus.is_empty()).then(|| products(host.cublas_lt)));
            (findings, !host.gpus.is_empty())
        }
        Err(error) => {
            let remedy = "the kernel module is loaded, and libcuda.so.1 beside it does not start: in a container name NVIDIA's runtime class \
                          (runtimeClassName), with the capability compute; outside of containers `nvidia-smi` says more";
            findings.push(Finding::new("cuda", Verdict::Failure.if_wanted(wanted.gpu), error.to_string(), remedy));
            (findings, false)
        }
    }
}

/// The files of kernels of this build; nothing if there is no folder and nobody needs one.
fn files(folder: &Path, needed: bool) -> Option<Finding> {
    if !needed && !folder.is_dir() {
        return None;
    }
    let (whole, wrong): (Vec<KernelsFile>, Vec<KernelsFile>) =
        cuda::kernels(folder).into_iter().partition(|file| file.is_of_this_build.is_ok());
    let targets: Vec<&str> = whole.iter().map(|file| file.target).collect();
    let found = format!("{}: {}", folder.display(), if targets.is_empty() { "none".into() } else { targets.join(" ") });
    // One that is missing matters to its GPUs alone, which say so.
    let damaged = wrong.iter().find(|file| file.path.exists());
    let Some(error) = damaged.or(wrong.first().filter(|_| targets.is_empty())).map(|file| &file.is_of_this_build)
    else {
        return Some(Finding::ok("gpu kernels", found));
    };
    let remedy = error.as_ref().err().map(ToString::to_string).unwrap_or_default();
    Some(Finding::new("gpu kernels", Verdict::Failure.if_wanted(needed || damaged.is_some()), found, remedy))
}

fn products(cublas_lt: Option<usize>) -> Finding {
    let remedy = "workers on GPUs start, and compute long prompts by Baton's own, slower products: put libcublasLt.so.13 on the library \
                  path (LD_LIBRARY_PATH), such as the folder of PyPI's nvidia-cublas";
    match cublas_lt {
        Some(version) => Finding::ok("cublaslt", format!("version {version}")),
        None => Finding::new("cublaslt", Verdict::Warning, "not found", remedy),
    }
}

/// Nodes that CUDA opens besides each GPU's.
const SHARED: [&str; 2] = ["nvidiactl", "nvidia-uvm"];

fn driver(root: &Path, wanted: bool) -> Finding {
    let lacks = |found: String, remedy: &str| Finding::new("gpu", Verdict::Failure.if_wanted(wanted), found, remedy);
    let Some(version) = line(&root.join("proc/driver/nvidia/version")) else {
        let remedy = "no NVIDIA driver is loaded: install it on this host (in Kubernetes on the node, whose drivers a container sees)";
        return lacks("no driver: workers compute on the CPU".into(), remedy);
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
    let oldest = cuda::DRIVER_MIN;
    if major(&version).is_some_and(|major| major < oldest) {
        // With NVIDIA's compatibility package it may load them, so the CUDA driver decides.
        let remedy = format!("kernels are cubins of CUDA 13.0: update the driver to version {oldest} or newer");
        return Finding::new("gpu", Verdict::Warning, format!("older than {oldest}: {version}"), remedy);
    }
    let count = gpus.len();
    Finding::ok("gpu", format!("{count} GPU{}, {version}", if count == 1 { "" } else { "s" }))
}

/// `580` of `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build`.
fn major(version: &str) -> Option<u32> {
    version.split_whitespace().find_map(|word| {
        let (major, rest) = word.split_once('.')?;
        rest.starts_with(|c: char| c.is_ascii_digit()).then(|| major.parse().ok())?
    })
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
    use baton_kernels::cuda::HostGpu;

    const VERSION: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build";

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
        let of = |gpu| {
            let wanted = Wanted { gpu, rdma: true };
            let (findings, usable) =
                look(bare.path(), wanted, &bare.path().join("kernels"), &[], |_| panic!("no driver"));
            assert!(!usable);
            findings
        };
        let told = of(false);
        assert_eq!((told.len(), told[0].verdict), (1, Verdict::Absent), "{told:?}");
        assert_eq!(told[0].found, "no driver: workers compute on the CPU");
        let told: Vec<Verdict> = of(true).into_iter().map(|f| f.verdict).collect();
        assert_eq!(told, [Verdict::Failure, Verdict::Failure, Verdict::Warning], "driver, kernels, GPUDirect");
    }

    #[test]
    fn gpus_are_those_that_open() {
        let one = host(&["nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps/", "nvme0"], "5.15.0-1-generic");
        assert_eq!(driver(one.path(), true), Finding::ok("gpu", format!("1 GPU, {VERSION}")));
        let two = host(&["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], "5.15.0");
        assert!(driver(two.path(), true).found.starts_with("2 GPUs, "));
    }

    #[test]
    fn a_driver_that_does_not_start_is_told_with_its_error() {
        let one = host(&["nvidia0", "nvidiactl", "nvidia-uvm"], "5.15.0");
        let look = |gpu| {
            let wanted = Wanted { gpu, rdma: false };
            look(one.path(), wanted, &one.path().join("kernels"), &[], |_| Err(CudaError::NoDriver)).0
        };
        let told = look(true);
        let last = told.last().unwrap();
        assert_eq!((last.check.as_str(), last.verdict), ("cuda", Verdict::Failure), "{told:?}");
        assert!(last.found.contains("libcuda.so.1"), "{told:?}");
        assert_eq!(look(false).last().unwrap().verdict, Verdict::Absent);
    }

    #[test]
    fn a_host_of_gpus_tells_whether_it_has_cublaslt() {
        let one = host(&["nvidia0", "nvidiactl", "nvidia-uvm"], "5.15.0");
        let gpu = devices::tests::gpu(0, (9, 0), 13_000, "", one.path());
        let told = |cublas_lt, gpus: &[HostGpu]| {
            let (wanted, kernels) = (Wanted { gpu: true, rdma: false }, one.path().join("kernels"));
            let host = Host { gpus: gpus.to_vec(), cublas_lt };
            let (findings, _) = look(one.path(), wanted, &kernels, &[], |_| Ok(host));
            findings.into_iter().find(|found| found.check == "cublaslt")
        };
        assert_eq!(told(Some(130_100), std::slice::from_ref(&gpu)), Some(Finding::ok("cublaslt", "version 130100")));
        let missing = told(None, &[gpu]).unwrap();
        assert_eq!(missing.verdict, Verdict::Warning, "workers start without it");
        assert!(missing.remedy.unwrap().contains("libcublasLt.so.13"));
        assert_eq!(told(None, &[]), None);
    }

    #[test]
    fn a_driver_that_is_older_than_the_kernels_is_told_and_asked() {
        let old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30";
        let nodes = ["dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm"].map(|node| (node, ""));
        let host = root(&[&[("proc/driver/nvidia/version", old)], &nodes[..]].concat());
        let told = driver(host.path(), true);
        assert_eq!(told.verdict, Verdict::Warning);
        assert!(told.found.contains("570.133.20") && told.remedy.unwrap().contains("580"));
        let wanted = Wanted { gpu: true, rdma: false };
        let mut asked = false;
        look(host.path(), wanted, &host.path().join("kernels"), &[], |_| {
            asked = true;
            Err(CudaError::NoDriver)
        });
        assert!(asked, "the CUDA driver decides");
        for (text, number) in [(VERSION, Some(580)), (old, Some(570)), ("NVRM version: x86_64", None), ("", None)] {
            assert_eq!(major(text), number, "{text}");
        }
    }

    #[test]
    fn files_of_kernels_are_of_this_build_or_told() {
        let host = root(&[("kernels/sm_90a.cubins", "BATONCU1")]);
        let told = files(&host.path().join("kernels"), false).unwrap();
        assert_eq!(told.verdict, Verdict::Failure, "a damaged file is wrong everywhere: {told:?}");
        assert!(told.remedy.is_some_and(|remedy| remedy.contains("sm_90a.cubins")));
        assert_eq!(files(&host.path().join("none"), false), None);
        assert_eq!(files(&host.path().join("none"), true).unwrap().verdict, Verdict::Failure);
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
        let closed = [
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Release Build"),
            ("proc/sys/kernel/osrelease", "6.8.0"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
        ];
        assert_eq!(gpu_direct(root(&closed).path(), true).verdict, Verdict::Warning, "only the open driver has them");
        let module = root(&[("sys/module/nvidia_peermem/version", "570.1")]);
        assert_eq!(gpu_direct(module.path(), true), Finding::ok("gpudirect", "module nvidia_peermem"));
    }
}
