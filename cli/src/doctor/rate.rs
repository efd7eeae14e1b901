//! The nominal rates of the devices that moved KV.

use super::sysfs::line;
use std::path::Path;

/// Names of the devices under these lanes, as `rc_mlx5/mlx5_0:1,tcp/eth0`, and their total rate in bytes per second; no rate if one of
/// them does not state it. If there are RDMA devices among them, only these count: they carry the KV.
pub(super) fn of_lanes(root: &Path, lanes: &str) -> Option<(String, Option<f64>)> {
    let mut devices: Vec<&str> = lanes.split(',').filter_map(|lane| Some(lane.split_once('/')?.1)).collect();
    devices.sort_unstable();
    devices.dedup();
    let is_rdma = |device: &&str| port_of(root, device).is_some_and(|port| port.exists());
    if devices.iter().any(is_rdma) {
        devices.retain(is_rdma);
    }
    let rates: Option<f64> = devices.iter().map(|device| rdma(root, device).or_else(|| network(root, device))).sum();
    (!devices.is_empty()).then(|| (devices.join("+"), rates))
}

/// Folder of an RDMA port named like `mlx5_0:1`.
fn port_of(root: &Path, device: &str) -> Option<std::path::PathBuf> {
    let (device, port) = device.split_once(':')?;
    Some(root.join("sys/class/infiniband").join(device).join("ports").join(port))
}

/// `200 Gb/sec (4X HDR)`, in bytes per second.
fn rdma(root: &Path, device: &str) -> Option<f64> {
    let told = line(&port_of(root, device)?.join("rate"))?;
    let gigabits: f64 = told.split_once(" Gb/sec")?.0.parse().ok()?;
    Some(gigabits * 1e9 / 8.0).filter(|rate| *rate > 0.0)
}

/// Megabits, in bytes per second; the kernel gives -1 for a device without a speed.
fn network(root: &Path, device: &str) -> Option<f64> {
    let megabits: f64 = line(&root.join("sys/class/net").join(device).join("speed"))?.parse().ok()?;
    Some(megabits * 1e6 / 8.0).filter(|rate| *rate > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::sysfs::tests::root;

    #[test]
    fn the_rate_is_that_of_the_devices_of_the_lanes() {
        let host = root(&[
            ("sys/class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n"),
            ("sys/class/infiniband/mlx5_1/ports/1/rate", "2.5 Gb/sec (1X SDR)\n"),
            ("sys/class/infiniband/mlx5_2/ports/1/state", "4: ACTIVE\n"),
            ("sys/class/net/eth0/speed", "25000\n"),
            ("sys/class/net/lo/speed", "-1\n"),
        ]);
        let of = |lanes: &str| of_lanes(host.path(), lanes);
        let is = |name: &str, rate: Option<f64>| Some((name.to_owned(), rate));
        for (lanes, expected) in [
            ("rc_mlx5/mlx5_0:1", is("mlx5_0:1", Some(25e9))),
            ("rc_mlx5/mlx5_0:1,tcp/eth0,ud_mlx5/mlx5_0:1", is("mlx5_0:1", Some(25e9))),
            ("rc_mlx5/mlx5_0:1,rc_mlx5/mlx5_1:1", is("mlx5_0:1+mlx5_1:1", Some(25.3125e9))),
            ("rc_mlx5/mlx5_0:1,rc_mlx5/mlx5_2:1", is("mlx5_0:1+mlx5_2:1", None)),
            ("tcp/eth0", is("eth0", Some(3.125e9))),
            ("tcp/lo", is("lo", None)),
            ("tcp/eth9", is("eth9", None)),
            ("", None),
        ] {
            assert_eq!(of(lanes), expected, "{lanes}");
        }
    }
}
