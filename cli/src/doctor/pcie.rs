//! How far apart two devices of the PCI bus are.

use super::sysfs::line;
use std::fs;
use std::path::Path;

/// What lies between two devices; less is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Distance {
    /// Both are below one bridge: so many links from one to the other.
    Switch { links: usize },
    /// They meet at the processor's host bridge.
    HostBridge { links: usize },
    /// They are below different host bridges of one NUMA node.
    SameNode,
    /// Data goes from one NUMA node to another, or nobody knows which those are.
    OtherNode,
}

impl Distance {
    /// For a report.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Switch { .. } => "below the same PCIe switch",
            Self::HostBridge { .. } => "at the same host bridge",
            Self::SameNode => "on the same NUMA node",
            Self::OtherNode => "on another NUMA node",
        }
    }
}

/// A device of the PCI bus: the bridges above it, from the host bridge on, and itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    path: Vec<String>,
    /// `None` if the kernel does not know it.
    node: Option<u32>,
}

impl Device {
    /// The device with this address, such as `0000:3b:00.0`.
    pub(super) fn at(root: &Path, address: &str) -> Option<Self> {
        Self::of(&root.join("sys/bus/pci/devices").join(address))
    }

    /// The device of an RDMA device, such as `mlx5_0`.
    pub(super) fn of_rdma(root: &Path, name: &str) -> Option<Self> {
        Self::of(&root.join("sys/class/infiniband").join(name).join("device"))
    }

    /// `link` leads to `…/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0`.
    fn of(link: &Path) -> Option<Self> {
        let folder = fs::canonicalize(link).ok()?;
        let names = folder.iter().map(|name| name.to_string_lossy().into_owned());
        let below = names.skip_while(|name| !name.starts_with("pci"));
        // A function of a NIC may have devices of another bus below it.
        let path: Vec<String> = below.take_while(|name| name.starts_with("pci") || name.contains(':')).collect();
        // The kernel writes -1 where it does not know the node.
        let node = line(&folder.join("numa_node")).and_then(|text| text.parse().ok());
        (path.len() > 1).then_some(Self { path, node })
    }

    /// How far it is to another device.
    pub(super) fn distance(&self, other: &Self) -> Distance {
        let common = self.path.iter().zip(&other.path).take_while(|(ours, theirs)| ours == theirs).count();
        let links = self.path.len() + other.path.len() - 2 * common;
        match common {
            0 if self.node.is_some() && self.node == other.node => Distance::SameNode,
            0 => Distance::OtherNode,
            1 => Distance::HostBridge { links },
            _ => Distance::Switch { links },
        }
    }
}

/// Those of `others` that are nearest to `device`, and how near that is.
pub(super) fn nearest<'a, T>(device: &Device, others: &'a [(T, Device)]) -> Option<(Distance, Vec<&'a T>)> {
    let distance = others.iter().map(|(_, other)| device.distance(other)).min()?;
    let of_it = others.iter().filter(|(_, other)| device.distance(other) == distance);
    Some((distance, of_it.map(|(other, _)| other).collect()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Adds devices to a root: where each is below `sys/devices`, its NUMA node, and the name of its RDMA device if it is one.
    pub(in crate::doctor) fn plug(root: &Path, devices: &[(&str, i32, &str)]) {
        let (bus, class) = (root.join("sys/bus/pci/devices"), root.join("sys/class/infiniband"));
        [&bus, &class].into_iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        for (path, node, rdma) in devices {
            let folder = root.join("sys/devices").join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), format!("{node}\n")).unwrap();
            symlink(format!("../../../devices/{path}"), bus.join(folder.file_name().unwrap())).unwrap();
            if !rdma.is_empty() {
                let of_class = folder.join("infiniband").join(rdma);
                fs::create_dir_all(&of_class).unwrap();
                symlink(format!("../../../{}", folder.file_name().unwrap().display()), of_class.join("device"))
                    .unwrap();
                symlink(format!("../../devices/{path}/infiniband/{rdma}"), class.join(rdma)).unwrap();
            }
        }
    }

    const SWITCH: &str = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";

    /// Two GPUs below one switch with a NIC, and NICs further and further away.
    fn host() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let below = |rest: &str| format!("{SWITCH}/{rest}");
        let devices = [
            (below("0000:3c:00.0/0000:3d:00.0"), 0, ""),
            (below("0000:3c:01.0/0000:3e:00.0"), 0, "mlx5_0"),
            (below("0000:3c:02.0/0000:3f:00.0/0000:40:00.0/0000:41:00.0"), 0, "mlx5_1"),
            ("pci0000:3a/0000:3a:01.0/0000:50:00.0".to_owned(), 0, "mlx5_2"),
            ("pci0000:60/0000:60:00.0/0000:61:00.0".to_owned(), 0, "mlx5_3"),
            ("pci0000:a0/0000:a0:00.0/0000:a1:00.0".to_owned(), 1, "mlx5_4"),
            ("pci0000:b0/0000:b0:00.0/0000:b1:00.0".to_owned(), -1, "mlx5_5"),
            ("pci0000:c0/0000:c0:00.0/0000:c1:00.0".to_owned(), -1, ""),
        ];
        let devices = devices.each_ref().map(|(path, node, rdma)| (path.as_str(), *node, *rdma));
        plug(root.path(), &devices);
        root
    }

    #[test]
    fn the_way_between_two_devices_is_by_bridges_and_then_by_nodes() {
        let root = host();
        let gpu = Device::at(root.path(), "0000:3d:00.0").unwrap();
        for (nic, distance) in [
            ("mlx5_0", Distance::Switch { links: 4 }),
            ("mlx5_1", Distance::Switch { links: 6 }),
            ("mlx5_2", Distance::HostBridge { links: 6 }),
            ("mlx5_3", Distance::SameNode),
            ("mlx5_4", Distance::OtherNode),
            ("mlx5_5", Distance::OtherNode),
        ] {
            let nic_device = Device::of_rdma(root.path(), nic).unwrap();
            assert_eq!(gpu.distance(&nic_device), distance, "{nic}");
            assert_eq!(nic_device.distance(&gpu), distance, "{nic}, the other way");
        }
        let unknown = Device::at(root.path(), "0000:c1:00.0").unwrap();
        let nic = Device::of_rdma(root.path(), "mlx5_5").unwrap();
        assert_eq!(unknown.distance(&nic), Distance::OtherNode, "two unknown nodes are not one");
        assert_eq!(Device::at(root.path(), "0000:99:00.0"), None);
        assert_eq!(Device::at(root.path(), ""), None);
    }

    #[test]
    fn all_that_are_equally_near_are_named() {
        let root = host();
        let nic = |name: &'static str| (name, Device::of_rdma(root.path(), name).unwrap());
        let near = |gpu: &str, nics: &[&'static str]| {
            let nics: Vec<_> = nics.iter().map(|name| nic(name)).collect();
            let found = nearest(&Device::at(root.path(), gpu).unwrap(), &nics);
            found.map(|(distance, names)| (distance, names.into_iter().copied().collect::<Vec<_>>()))
        };
        let all = ["mlx5_4", "mlx5_2", "mlx5_0", "mlx5_1", "mlx5_3"];
        assert_eq!(near("0000:3d:00.0", &all), Some((Distance::Switch { links: 4 }, vec!["mlx5_0"])));
        assert_eq!(near("0000:3d:00.0", &["mlx5_4", "mlx5_3"]), Some((Distance::SameNode, vec!["mlx5_3"])));
        assert_eq!(near("0000:c1:00.0", &["mlx5_4", "mlx5_5"]), Some((Distance::OtherNode, vec!["mlx5_4", "mlx5_5"])));
        assert_eq!(near("0000:3d:00.0", &[]), None);
    }
}
