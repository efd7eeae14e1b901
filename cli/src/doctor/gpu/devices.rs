//! Judges each GPU that the CUDA driver sees: its class, its kernels, the nearest NIC, and what a worker on it is started with.

use super::Wanted;
use crate::doctor::finding::{Finding, Verdict};
use crate::doctor::pcie::{Device, nearest};
use crate::doctor::rdma::UsablePort;
use baton_kernels::cuda::{Capability, HostGpu};
use std::path::Path;

/// Two findings of each GPU.
pub(super) fn judge(root: &Path, gpus: &[HostGpu], wanted: Wanted, ports: &[UsablePort]) -> Vec<Finding> {
    let ports: Vec<(&UsablePort, Device)> =
        ports.iter().filter_map(|port| Some((port, Device::of_rdma(root, &port.device)?))).collect();
    gpus.iter().flat_map(|gpu| [device(gpu, wanted.gpu), way(root, gpu, wanted, &ports)]).collect()
}

fn device(found: &HostGpu, wanted: bool) -> Finding {
    let HostGpu { gpu, cores, kernels, gpu_direct, dma_buf, .. } = found;
    let class = match (cores, gpu.capability) {
        (Some(cores), Capability { major: 9, minor: 0 }) => format!("class {}", cores.name()),
        // Nobody has measured its bits.
        (Some(cores), _) => format!("class {} if its known answers are right at the start", cores.name()),
        (None, _) => "no class".into(),
    };
    let reach = match (gpu_direct, dma_buf) {
        (true, true) => "GPUDirect RDMA and DMA buffers",
        (true, false) => "GPUDirect RDMA without DMA buffers",
        (false, _) => "no GPUDirect RDMA",
    };
    let memory = gpu.memory as f64 / f64::from(1 << 30);
    let about = format!(
        "{}, compute capability {}, {memory:.1} GiB, CUDA {}, {class}, {reach}",
        gpu.name, gpu.capability, gpu.cuda
    );
    let check = format!("gpu cuda:{}", gpu.ordinal);
    match kernels {
        Ok(()) => Finding::ok(check, format!("{about}; kernels of this build")),
        Err(error) => {
            Finding::new(check, Verdict::Failure.if_wanted(wanted), format!("{about}; no kernels"), error.to_string())
        }
    }
}

/// The nearest NIC, and the flags of a worker on this GPU.
fn way(root: &Path, found: &HostGpu, wanted: Wanted, ports: &[(&UsablePort, Device)]) -> Finding {
    let (check, device) =
        (format!("nic of cuda:{}", found.gpu.ordinal), format!("--device cuda:{}", found.gpu.ordinal));
    let alone = |why: &str, remedy: &str| {
        let verdict = Verdict::Warning.if_wanted(wanted.gpu && wanted.rdma);
        Finding::new(check.clone(), verdict, format!("{why}: {device} --transport tcp"), remedy)
    };
    if ports.is_empty() {
        return alone("no RDMA port can be used", "do first what is said of rdma above");
    }
    let Some((distance, nics)) = Device::at(root, &found.pci).and_then(|gpu| nearest(&gpu, ports)) else {
        let remedy = "mount /sys in this container, or compare `nvidia-smi topo -m` by hand";
        return alone("this GPU is not among /sys/bus/pci/devices", remedy);
    };
    let names: Vec<&str> = nics.iter().map(|port| port.name.as_str()).collect();
    let names = names.join(",");
    Finding::ok(check, format!("{names}, {}: {device} --transport ucx --ucx-net-devices {names}", distance.name()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::doctor::pcie::tests::plug;
    use baton_kernels::cuda::{CudaVersion, Gpu, RemoteWrites};

    const WANTED: Wanted = Wanted { gpu: true, rdma: true };

    /// A GPU with all ways to it; kernels are looked for below `root`.
    pub(in crate::doctor::gpu) fn gpu(
        ordinal: u32,
        capability: (u32, u32),
        cuda: u32,
        pci: &str,
        root: &Path,
    ) -> HostGpu {
        let capability = Capability { major: capability.0, minor: capability.1 };
        let (name, memory) = ("NVIDIA H100".to_owned(), 80 << 30);
        let (cuda, remote_writes) = (CudaVersion(cuda), RemoteWrites::Ordered);
        let gpu = Gpu { name, ordinal, capability, processors: 132, memory, cuda, remote_writes };
        HostGpu::new(gpu, pci.to_owned(), true, true, &root.join("kernels"))
    }

    fn port(device: &str) -> UsablePort {
        UsablePort { device: device.into(), name: format!("{device}:1") }
    }

    #[test]
    fn every_gpu_has_its_nic_and_the_flags_for_both() {
        let root = tempfile::tempdir().unwrap();
        plug(
            root.path(),
            &[
                ("pci0000:10/0000:10:00.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0, ""),
                ("pci0000:10/0000:10:00.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 0, "mlx5_0"),
                ("pci0000:80/0000:80:00.0/0000:81:00.0", 1, ""),
                ("pci0000:90/0000:90:00.0/0000:91:00.0", 1, "mlx5_1"),
                ("pci0000:98/0000:98:00.0/0000:99:00.0", 1, "mlx5_2"),
            ],
        );
        let gpus = ["0000:13:00.0", "0000:81:00.0"];
        let gpus: Vec<_> = (0..).zip(gpus).map(|(n, pci)| gpu(n, (9, 0), 13_000, pci, root.path())).collect();
        let of = |ports: &[UsablePort]| -> Vec<String> {
            let findings = judge(root.path(), &gpus, WANTED, ports);
            findings.into_iter().filter(|f| f.check.starts_with("nic of")).map(|f| f.found).collect()
        };
        assert_eq!(
            of(&["mlx5_0", "mlx5_1", "mlx5_2"].map(port)),
            [
                "mlx5_0:1, below the same PCIe switch: --device cuda:0 --transport ucx --ucx-net-devices mlx5_0:1",
                "mlx5_1:1,mlx5_2:1, on the same NUMA node: --device cuda:1 --transport ucx --ucx-net-devices mlx5_1:1,mlx5_2:1",
            ]
        );
        assert_eq!(of(&[port("mlx5_0")])[1].split(": ").next(), Some("mlx5_0:1, on another NUMA node"));
        assert_eq!(of(&[])[0], "no RDMA port can be used: --device cuda:0 --transport tcp");
        let hidden = [gpu(0, (9, 0), 13_000, "0000:77:00.0", root.path())];
        let told = judge(root.path(), &hidden, WANTED, &[port("mlx5_0")]);
        assert_eq!(told[1].verdict, Verdict::Warning, "{told:?}");
    }

    #[test]
    fn a_gpu_tells_its_class_and_whether_there_are_kernels_for_it() {
        let root = tempfile::tempdir().unwrap();
        for (capability, cuda, class, remedy) in [
            ((9, 0), 13_000, ", class tc16f25, GPUDirect", "sm_90a.cubins: No such file"),
            ((8, 6), 13_010, ", class tc8f24 if its known answers are right", "sm_80.cubins"),
            ((7, 5), 13_000, ", no class, ", "compute capability 7.5"),
            ((9, 0), 12_040, "CUDA 12.4", "580"),
        ] {
            let gpu = gpu(3, capability, cuda, "", root.path());
            let told = device(&gpu, true);
            assert_eq!((told.check.as_str(), told.verdict), ("gpu cuda:3", Verdict::Failure));
            assert!(told.found.contains(class) && told.found.ends_with("; no kernels"), "{told:?}");
            assert!(told.remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{told:?}");
            let whole = HostGpu { kernels: Ok(()), ..gpu };
            assert!(
                device(&whole, true).found.ends_with(
                    "80.0 GiB, CUDA 13.0, class tc16f25, GPUDirect RDMA and DMA buffers; kernels of this build"
                ) || capability != (9, 0)
                    || cuda != 13_000
            );
            assert_eq!(device(&whole, true).verdict, Verdict::Ok);
        }
    }
}
